"""Merging rules need whole tensors: sharded pseudo-gradients give what unsharded ones give."""

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from isoloco.aggregate import OPTIONS, aggregate
from tests.run_ranks import run_ranks

pytestmark = pytest.mark.slow

ARGUMENTS: dict[str, Any] = {
    "weights": [1.0, 2.0, 0.0, 3.0],
    "worker_ids": [4, 5, 6, 7],
    "name": "w",
    "round_number": 2,
}


def deltas_of(shape: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for _ in range(4)]


def merge_sharded() -> dict[str, bool]:
    """Of every rule, shape and placement, whether the result is placed like the input and equal to the unsharded."""
    mesh = init_device_mesh("cpu", (2,))
    equal = {}
    for rule in OPTIONS:
        for shape in ((33, 16), (16, 24), (7,)):
            expected = aggregate(deltas_of(shape), rule, **ARGUMENTS)
            for placement in (Shard(0), Shard(len(shape) - 1), Replicate()):
                sharded = [distribute_tensor(delta, mesh, [placement]) for delta in deltas_of(shape)]
                result = aggregate(sharded, rule, **ARGUMENTS)
                assert isinstance(result, DTensor)
                same = result.placements == (placement,) and torch.equal(result.full_tensor(), expected)
                equal[f"{rule} {shape} {placement}"] = same
    return equal


def merge_with_a_bad_shard() -> str:
    """What every rank is told of a NaN that only one of them holds."""
    mesh = init_device_mesh("cpu", (2,))
    bad, good = torch.ones(8, 4), torch.ones(8, 4)
    bad[0, 0] = float("nan")
    with pytest.raises(ValueError, match="non-finite") as caught:
        aggregate([distribute_tensor(delta, mesh, [Shard(0)]) for delta in (bad, good)], "ties")
    return str(caught.value)


def test_sharded_is_unsharded_bit_for_bit() -> None:
    for equal in run_ranks(2, merge_sharded):
        assert [case for case, same in equal.items() if not same] == []


def test_every_rank_learns_of_bad_values() -> None:
    first, second = run_ranks(2, merge_with_a_bad_shard)
    assert first == second
