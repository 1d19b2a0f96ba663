"""The loss over a vocabulary that is split over ranks equals the one over whole logits, gradient and all."""

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

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


def loss_and_gradient(case: str, tp_mesh: DeviceMesh | None) -> tuple[Tensor, Tensor]:
    logits, labels = example(case)
    if tp_mesh is not None:
        logits = distribute_tensor(logits, tp_mesh, [Shard(2)], src_data_rank=None)
    logits.requires_grad_()
    loss = cross_entropy_sum(logits, labels)
    (loss / 7).backward()
    return loss.detach(), logits.grad.full_tensor() if isinstance(logits, DTensor) else logits.grad


def on_a_rank() -> tuple[list[tuple[Tensor, Tensor]], float, int]:
    mesh = build_mesh(2, 2, "cpu")
    assert mesh is not None
    value = torch.tensor(10.0 ** mesh.get_local_rank("dp_shard"))
    total, number = sum_over_data_parallel(value, mesh), sum_over_data_parallel(torch.tensor(3), mesh)
    assert value.item() == 10.0 ** mesh.get_local_rank("dp_shard"), "the input is kept"
    return [loss_and_gradient(case, mesh["tp"]) for case in CASES], total.item(), int(number.item())


@pytest.fixture(scope="module")
def by_rank() -> list[tuple[list[tuple[Tensor, Tensor]], float, int]]:
    return run_ranks(4, on_a_rank)


@pytest.mark.parametrize("case", CASES)
def test_split_and_whole_logits_give_the_same_loss_and_gradient(case: str, by_rank: list) -> None:
    expected = loss_and_gradient(case, None)
    assert expected[0].isfinite()
    of_the_ranks = [losses[CASES.index(case)] for losses, _, _ in by_rank]
    for found in of_the_ranks:
        torch.testing.assert_close(found, expected)
        assert torch.equal(found[0], of_the_ranks[0][0]), "ranks that see the same tokens see another loss"


def test_sums_count_each_data_parallel_rank_once(by_rank: list) -> None:
    assert [(total, number) for _, total, number in by_rank] == [(11.0, 6)] * 4
