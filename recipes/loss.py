"""Next-token cross-entropy, summed and not averaged: the caller divides by the tokens of the group's global batch.

How the numbers of a step are put together, with `n` the group's valid tokens in its global batch:

    num_valid = sum over micro-batches of (labels != IGNORE_INDEX).sum()
    n = sum_over_data_parallel(num_valid, mesh)                 # before the first backward
    for each micro-batch: loss = cross_entropy_sum(model(tokens), labels); (loss / n).backward()
    logged loss = sum_over_data_parallel(sum of the losses, mesh) / n

`parallelize` has gradients summed, not averaged, over the data-parallel ranks, so this is the gradient of the mean over
the group's tokens, whatever the sharding, the micro-batching and the padding.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.functional import cross_entropy

IGNORE_INDEX = -100  # labels with this value count neither in the loss nor in the number of valid tokens


def cross_entropy_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum over this rank's tokens of -log p(label), in nats: a 0-dim fp32 tensor, differentiable.

    `logits` (B, T, V) of any float dtype, either whole or a DTensor sharded over V (vocabulary parallel, from a model
    parallelised with tensor parallelism); `labels` (B, T) int64, `IGNORE_INDEX` where there is nothing to predict.
    Tensor-parallel ranks see the same tokens and all return the same sum. Computed in fp32.
    """
    if isinstance(logits, DTensor):
        (placement,) = logits.placements
        assert placement == Shard(2), f"logits are laid out as {placement}, not over the vocabulary"
        group = logits.device_mesh.get_group()
        assert logits.size(2) % group.size() == 0
        local = logits.to_local().flatten(0, 1)  # (B T, V / tp)
        return _VocabularyParallelCrossEntropy.apply(local, labels.flatten(), group)
    return cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")


class _VocabularyParallelCrossEntropy(torch.autograd.Function):
    """Each rank holds a slice of the vocabulary; three numbers per token travel (Megatron-LM, arXiv 1909.08053, 3).

    torch's `loss_parallel` computes the same, but keeps an fp32 copy of the logits until the backward and works only if
    the caller runs that inside its context, too.
    """

    @staticmethod
    def forward(ctx, logits: Tensor, labels: Tensor, group: dist.ProcessGroup) -> Tensor:  # type: ignore[no-untyped-def]
        num_local = logits.size(1)
        local_labels = labels - dist.get_rank(group) * num_local  # (N,)
        is_local = (local_labels >= 0) & (local_labels < num_local)
        local_labels = local_labels.where(is_local, 0)

        shifted = logits.float()  # (N, V / tp)
        peak = shifted.amax(dim=1)  # (N,)
        dist.all_reduce(peak, dist.ReduceOp.MAX, group)
        shifted = shifted - peak[:, None]
        label_logit = shifted.gather(1, local_labels[:, None]).squeeze(1).where(is_local, 0.0)
        sums = torch.stack((shifted.exp().sum(dim=1), label_logit))  # (2, N)
        dist.all_reduce(sums, dist.ReduceOp.SUM, group)
        log_total = sums[0].log()

        is_valid = labels != IGNORE_INDEX
        ctx.save_for_backward(logits, peak + log_total, local_labels, is_local, is_valid)
        return (log_total - sums[1]).where(is_valid, 0.0).sum()

    @staticmethod
    def backward(ctx, grad_sum: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[no-untyped-def]
        logits, log_normalizer, local_labels, is_local, is_valid = ctx.saved_tensors
        grad = (logits.float() - log_normalizer[:, None]).exp_()  # the softmax, (N, V / tp)
        grad.scatter_add_(1, local_labels[:, None], -is_local.float()[:, None])
        grad.mul_(grad_sum).masked_fill_(~is_valid[:, None], 0.0)
        return grad.to(logits.dtype), None, None


def sum_over_data_parallel(value: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """Sum of a 0-dim tensor (a loss sum, a count of tokens) over the group's data-parallel ranks; the input is kept.

    Over the "dp_shard" axis only: the ranks of the "tp" axis hold the same tokens, and would count them twice.
    `mesh` is the one of `build_mesh`; None, one rank without a process group, gives the value back.
    """
    total = value.detach().clone()
    if mesh is not None:
        dist.all_reduce(total, group=mesh.get_group("dp_shard"))
    return total
