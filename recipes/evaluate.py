"""Validation loss of a model, as `train` measures it before and after, and as a program on a checkpoint's model."""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from recipes.data import PackedSamples, validation_batches
from recipes.loss import IGNORE_INDEX, cross_entropy_sum, sum_over_data_parallel


@torch.no_grad()
def validation_loss(
    model: nn.Module,
    samples: PackedSamples,
    *,
    num_batches: int,
    local_batch_size: int,
    mesh: DeviceMesh | None,
    dp_rank: int,
    dp_degree: int,
    device: torch.device,
) -> float:
    """Mean loss per token over the first batches of ``samples`` (-1: all of them), in nats.

    A batch is ``local_batch_size`` samples for each of the ``dp_degree`` data-parallel ranks; all ranks call this.
    """
    total = torch.zeros((), dtype=torch.float32, device=device)
    num_tokens = torch.zeros((), dtype=torch.int64, device=device)
    for batch in validation_batches(samples, num_batches, local_batch_size * dp_degree):
        tokens = batch[:1].repeat(local_batch_size, 1)  # stands in where the last batch is short, and is not counted
        labels = torch.full_like(tokens[:, 1:], IGNORE_INDEX)
        own = batch[dp_rank * local_batch_size : (dp_rank + 1) * local_batch_size]
        tokens[: len(own)] = own
        labels[: len(own)] = own[:, 1:]
        labels = labels.to(device)
        total += cross_entropy_sum(model(tokens[:, :-1].to(device)), labels)
        num_tokens += (labels != IGNORE_INDEX).sum()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # A forward pass without a backward leaves the last units gathered; a later round would then change the
            # shards behind the copies that the next forward uses.
            module.reshard()
    total = sum_over_data_parallel(total, mesh)
    return (total / sum_over_data_parallel(num_tokens, mesh)).item()
