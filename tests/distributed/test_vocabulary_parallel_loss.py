"""The loss over a vocabulary that is split over ranks equals the one over whole logits, gradient and all."""

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from recipes.loss import IGNORE_INDEX, cross_entropy_sum, sum_over_data_parallel
from recipes.parallelize import build_mesh
from tests.run_ranks import run_ranks

pytestmark = pytest.mark.slow

CASES = ("ordinary", "ignored", "all ignored", "huge", "minus infinity", "bfloat16")


def example(case: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(3, 5, 12, generator=generator)
    labels = torch.randint(0, 12, (3, 5), generator=generator)
    if case == "ignored":
        labels[0, 2:] = labels[2] = IGNORE_INDEX
    elif case == "all ignored":
        labels.fill_(IGNORE_INDEX)
    elif case == "huge":
        logits *= 1e4  # exp of it overflows unless the largest of all ranks is taken off first
    elif case == "minus infinity":
        logits[..., :6] = logits[..., :6].where(labels[..., None] < 6, -torch.inf)  # nothing possible on one rank
    elif case == "bfloat16":
        logits = logits.bfloat16()
    return logits, labels


def loss_and_gradient(case: str, split: bool) -> tuple[Tensor, Tensor]:
    logits, labels = example(case)
    logits.requires_grad_()
    given = logits
    if split:
        given = distribute_tensor(logits, init_device_mesh("cpu", (2,)), [Shard(2)], src_data_rank=None)
    loss = cross_entropy_sum(given, labels)
    (loss / 7).backward()
    return loss.detach(), logits.grad


def split_losses() -> list[tuple[Tensor, Tensor]]:
    found = []
    for case in CASES:
        loss, gradient = loss_and_gradient(case, split=True)
        found.append((loss, gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient))
    return found


def test_split_and_whole_logits_give_the_same_loss_and_gradient() -> None:
    by_rank = run_ranks(2, split_losses)
    for index, case in enumerate(CASES):
        expected_loss, expected_gradient = loss_and_gradient(case, split=False)
        for loss, gradient in (found[index] for found in by_rank):
            torch.testing.assert_close(loss, expected_loss, msg=lambda text, case=case: f"{case}: {text}")
            torch.testing.assert_close(gradient, expected_gradient, msg=lambda text, case=case: f"{case}: {text}")
        assert torch.equal(by_rank[0][index][0], by_rank[1][index][0]), case


def summed(dp_shard: int, tp: int) -> tuple[float, int]:
    mesh = build_mesh(dp_shard, tp, "cpu")
    assert mesh is not None
    value = torch.tensor(10.0 ** mesh.get_local_rank("dp_shard"))
    total = sum_over_data_parallel(value, mesh)
    assert value.item() == 10.0 ** mesh.get_local_rank("dp_shard"), "the input is kept"
    return total.item(), sum_over_data_parallel(torch.tensor(3), mesh).item()


def test_sums_count_each_data_parallel_rank_once() -> None:
    assert run_ranks(4, summed, 2, 2) == [(11.0, 6)] * 4
