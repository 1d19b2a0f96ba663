"""The digest counts every element once, whatever the sharding: all layouts, even, uneven and empty, give one value."""

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from isoloco.digest import digest
from tests.run_ranks import run_ranks

LAYOUTS: dict[int, dict[str, tuple[tuple[int, ...], tuple[Placement, ...]]]] = {
    2: {
        "rows": ((2,), (Shard(0),)),
        "columns": ((2,), (Shard(1),)),
        "replicated": ((2,), (Replicate(),)),
    },
    4: {
        "rows": ((4,), (Shard(0),)),
        "rows_and_columns": ((2, 2), (Shard(0), Shard(1))),
        "columns_and_rows": ((2, 2), (Shard(1), Shard(0))),
        "strided_rows": ((2, 2), (_StridedShard(0, split_factor=2), Shard(0))),
        "rows_of_rows": ((2, 2), (Shard(0), Shard(0))),
        "rows_replicated": ((2, 2), (Shard(0), Replicate())),
        "replicated_rows": ((2, 2), (Replicate(), Shard(0))),
    },
}
SHAPES = {"even": (64, 8), "odd": (65, 7), "few": (3, 5), "single_row": (1, 64), "stack": (5, 3, 2)}


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def sharded(named: dict[str, torch.Tensor], mesh: DeviceMesh, placements: tuple[Placement, ...]) -> dict[str, DTensor]:
    return {
        name: distribute_tensor(tensor, mesh, placements, src_data_rank=None)  #
        for name, tensor in named.items()
    }


def digests_by_layout(world_size: int) -> dict[str, str]:
    found = {"whole": digest(tensors().items())}
    for layout, (mesh_shape, placements) in LAYOUTS[world_size].items():
        mesh = init_device_mesh("cpu", mesh_shape)
        found[layout] = digest(sharded(tensors(), mesh, placements).items())
        # some sharded, some not, as where a mesh of one layout leaves small parameters alone
        mixed = tensors() | sharded({"odd": tensors()["odd"]}, mesh, placements)
        found[f"{layout}, some plain"] = digest(mixed.items())
    return found


@pytest.mark.parametrize("world_size", LAYOUTS)
def test_all_layouts_give_the_digest_of_the_whole_tensors(world_size: int) -> None:
    expected = digest(tensors().items())
    for found in run_ranks(world_size, digests_by_layout, world_size):
        assert found == dict.fromkeys(found, expected)
        assert len(found) == 1 + 2 * len(LAYOUTS[world_size])


def digests_after_flips(world_size: int) -> list[str]:
    """The digest after flipping the lowest bit of one element, for elements on different ranks, in every layout."""
    found = []
    for mesh_shape, placements in LAYOUTS[world_size].values():
        mesh = init_device_mesh("cpu", mesh_shape)
        for element in (0, 100, 454):
            named = tensors()
            named["odd"].view(-1).view(torch.int32)[element] ^= 1
            found.append(digest(sharded(named, mesh, placements).items()))
    return found


def test_one_bit_on_one_rank_changes_the_digest_everywhere() -> None:
    results = run_ranks(4, digests_after_flips, 4)
    assert results[1:] == results[:1] * 3
    by_layout = [tuple(results[0][start : start + 3]) for start in range(0, len(results[0]), 3)]
    assert len(set(by_layout)) == 1
    assert len({*by_layout[0], digest(tensors().items())}) == 4


def digest_of_a_diverged_replica() -> tuple[str, str]:
    """Replicated tensors of which only the copy on the last rank is corrupt."""
    mesh = init_device_mesh("cpu", (2,))
    local = torch.ones(4, 4)
    if dist.get_rank() == 1:
        local[0, 0] = 2
    return digest([("a", DTensor.from_local(local, mesh, [Replicate()], run_check=False))]), digest(
        [("a", torch.ones(4, 4))]
    )


def test_replicas_are_counted_once_by_the_first_of_them() -> None:
    """Documents a limit: what only a later replica holds is not seen."""
    for found, expected in run_ranks(2, digest_of_a_diverged_replica):
        assert found == expected


def digest_of_a_model() -> list[tuple[str, str]]:
    """A model under FSDP2 × tensor parallelism; its norm is sharded over the FSDP axis only, one copy per TP rank."""
    found = []
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    for inner, middle, outer in ((8, 16, 8), (5, 13, 65), (4, 3, 6)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(inner, middle), nn.Linear(middle, outer, bias=False), nn.LayerNorm(outer))
        expected = digest((name, parameter.detach().clone()) for name, parameter in model.named_parameters())
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp_shard"])
        meshes = {parameter.device_mesh.size() for parameter in model.parameters()}
        assert meshes == {2, 4}
        found.append((digest(model.named_parameters()), expected))
    return found


def test_digest_of_a_model_under_fsdp2_and_tensor_parallelism() -> None:
    for found in run_ranks(4, digest_of_a_model):
        for sharded_digest, expected in found:
            assert sharded_digest == expected


def digest_in_two_groups() -> tuple[str, str]:
    """Two groups of two ranks in one world: each takes the digest of its own, different, model."""
    first, second = dist.new_group([0, 1]), dist.new_group([2, 3])
    mine, offset = (first, 0) if dist.get_rank() < 2 else (second, 1)
    mesh = DeviceMesh.from_group(mine, "cpu")
    named = {name: tensor + offset for name, tensor in tensors().items()}
    mixed = sharded(named, mesh, (Shard(0),)) | {"plain": torch.full((3,), float(offset))}
    return digest(mixed.items(), group=mine), digest((named | {"plain": mixed["plain"]}).items())


def test_digest_over_a_group_of_ranks() -> None:
    results = run_ranks(4, digest_in_two_groups)
    assert all(found == expected for found, expected in results)
    assert results[0] != results[2]


def digest_of_unsummed_parts() -> None:
    parts = DTensor.from_local(torch.ones(4), init_device_mesh("cpu", (2,)), [Partial()])
    with pytest.raises(ValueError, match="reduce it"):
        digest([("a", parts)])


def test_unsummed_parts_are_refused() -> None:
    run_ranks(2, digest_of_unsummed_parts)
