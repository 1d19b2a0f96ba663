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

pytestmark = pytest.mark.slow

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
    return {name: distribute_tensor(tensor, mesh, placements, src_data_rank=None) for name, tensor in named.items()}


def digests_by_layout(world_size: int) -> dict[str, str]:
    found = {"whole": digest(tensors().items())}
    for layout, (mesh_shape, placements) in LAYOUTS[world_size].items():
        mesh = init_device_mesh("cpu", mesh_shape)
        found[layout] = digest(sharded(tensors(), mesh, placements).items())
        # some sharded, some not, as where a mesh of one layout leaves small parameters alone
        mixed = tensors() | sharded({"odd": tensors()["odd"]}, mesh, placements)
        found[f"{layout}, some plain"] = digest(mixed.items())
    return found


def digests_after_flips(world_size: int) -> dict[str, list[str]]:
    """By layout, the digests after flipping the lowest bit of one element; the elements are on different ranks."""
    found: dict[str, list[str]] = {}
    for layout, (mesh_shape, placements) in LAYOUTS[world_size].items():
        mesh = init_device_mesh("cpu", mesh_shape)
        found[layout] = []
        for element in (0, 100, 454):
            named = tensors()
            named["odd"].view(-1).view(torch.int32)[element] ^= 1
            found[layout].append(digest(sharded(named, mesh, placements).items()))
    return found


def digest_of_a_diverged_replica() -> tuple[str, str]:
    """Replicated tensors of which only the copy on the last rank is corrupt."""
    mesh = init_device_mesh("cpu", (2,))
    local = torch.ones(4, 4)
    if dist.get_rank() == 1:
        local[0, 0] = 2
    return digest([("a", DTensor.from_local(local, mesh, [Replicate()], run_check=False))]), digest(
        [("a", torch.ones(4, 4))]
    )


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


def digest_in_two_groups() -> tuple[str, str]:
    """Two groups of two ranks in one world: each takes the digest of its own, different, model."""
    first, second = dist.new_group([0, 1]), dist.new_group([2, 3])
    mine, offset = (first, 0) if dist.get_rank() < 2 else (second, 1)
    mesh = DeviceMesh.from_group(mine, "cpu")
    named = {name: tensor + offset for name, tensor in tensors().items()}
    mixed = sharded(named, mesh, (Shard(0),)) | {"plain": torch.full((3,), float(offset))}
    return digest(mixed.items(), group=mine), digest((named | {"plain": mixed["plain"]}).items())


def digest_of_unsummed_parts() -> None:
    parts = DTensor.from_local(torch.ones(4), init_device_mesh("cpu", (2,)), [Partial()])
    with pytest.raises(ValueError, match="reduce it"):
        digest([("a", parts)])


def measure(world_size: int) -> dict:
    """Everything that is asked of a world of so many ranks, in one start of its processes."""
    measured = {"layouts": digests_by_layout(world_size), "flips": digests_after_flips(world_size)}
    if world_size == 2:
        digest_of_unsummed_parts()
        measured["diverged_replica"] = digest_of_a_diverged_replica()
    else:
        measured["model"] = digest_of_a_model()
        measured["two_groups"] = digest_in_two_groups()
    return measured


@pytest.fixture(scope="module")
def worlds() -> dict[int, list[dict]]:
    """By world size, what each rank measured."""
    return {world_size: run_ranks(world_size, measure, world_size) for world_size in LAYOUTS}


@pytest.mark.parametrize("world_size", LAYOUTS)
def test_all_layouts_give_the_digest_of_the_whole_tensors(worlds, world_size: int) -> None:
    expected = digest(tensors().items())
    for measured in worlds[world_size]:
        assert measured["layouts"] == dict.fromkeys(measured["layouts"], expected)
        assert len(measured["layouts"]) == 1 + 2 * len(LAYOUTS[world_size])


@pytest.mark.parametrize("world_size", LAYOUTS)
def test_one_bit_on_one_rank_changes_the_digest_everywhere(worlds, world_size: int) -> None:
    unchanged = digest(tensors().items())
    for measured in worlds[world_size]:
        flips = measured["flips"]
        assert flips == dict.fromkeys(flips, flips["rows"]), "as much in one layout as in another"
        assert len({*flips["rows"], unchanged}) == 4
        assert flips == worlds[world_size][0]["flips"]


def test_replicas_are_counted_once_by_the_first_of_them(worlds) -> None:
    """Documents a limit: what only a later replica holds is not seen."""
    for measured in worlds[2]:
        found, expected = measured["diverged_replica"]
        assert found == expected


def test_digest_of_a_model_under_fsdp2_and_tensor_parallelism(worlds) -> None:
    for measured in worlds[4]:
        assert len(measured["model"]) == 3
        for found, expected in measured["model"]:
            assert found == expected


def test_digest_over_a_group_of_ranks(worlds) -> None:
    results = [measured["two_groups"] for measured in worlds[4]]
    assert all(found == expected for found, expected in results)
    assert results[0] != results[2]
