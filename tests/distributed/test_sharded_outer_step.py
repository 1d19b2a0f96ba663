"""The outer step on sharded matrices equals the one on whole matrices (I19), and leaves equal bits everywhere (I20).

Two ranks and four, as FSDP2 and tensor parallelism place parameters, alone and together, shards uneven and empty. Each
world runs once for all its cases; what it measured is then judged case by case.
"""

import functools

import pytest
import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from isoloco.digest import digest
from isoloco.isotropic import isotropic
from isoloco.outer_optimizer import OuterOptimizer
from tests.distributed.sharded_cases import LAYOUTS, WORLDS_AND_LAYOUTS, awkward_matrices, shard
from tests.run_ranks import run_ranks

pytestmark = pytest.mark.slow

METHODS = {
    "svd": {"isotropic": "svd"},
    "newton_schulz": {"isotropic": "newton_schulz", "scale": "rms"},
    "svd_of_update": {"isotropic": "svd", "target": "update"},
    "diloco": {"isotropic": None},
}

CASES = ("tall", "wide", "square", "odd_rows", "few_rows", "single_row", "deficient", "zero", "tiny", "huge", "gain")


def initial_parameters() -> dict[str, torch.Tensor]:
    # as large as the pseudo-gradients, so that errors of the step are not hidden by the parameter's size
    return awkward_matrices(seed=0)


def two_rounds(parameters: dict[str, torch.Tensor], place, options: dict) -> OuterOptimizer:
    optimizer = OuterOptimizer(parameters.items(), lr=0.7, momentum=0.8, **options)
    for seed in (1, 2):
        for name, gradient in awkward_matrices(seed).items():
            parameters[name].grad = place(gradient)
        optimizer.step()
    return optimizer


def outer_state(parameters: dict[str, torch.Tensor], optimizer: OuterOptimizer) -> dict[str, torch.Tensor]:
    state = dict(parameters)
    for name, parameter in parameters.items():
        state[f"momentum.{name}"] = optimizer.state[parameter]["momentum_buffer"]
    return state


def measure_outer_steps(world_size: int) -> dict:
    """On every rank: relative errors of θ and momentum by (layout, method, case), and digests by (layout, method)."""
    measured: dict = {"errors": {}, "digests": {}, "placed_alike": {}}
    for method, options in METHODS.items():
        whole = initial_parameters()
        whole_state = outer_state(whole, two_rounds(whole, lambda tensor: tensor, options))
        measured["digests"]["whole", method] = digest(whole_state.items())
        for layout, (mesh_shape, placements) in LAYOUTS[world_size].items():
            mesh = init_device_mesh("cpu", mesh_shape)
            place = functools.partial(shard, mesh=mesh, placements=placements)
            parameters = {name: place(tensor) for name, tensor in initial_parameters().items()}
            state = outer_state(parameters, two_rounds(parameters, place, options))
            for name, expected in whole_state.items():
                error = (state[name].full_tensor().double() - expected.double()).norm()
                error /= expected.double().norm().clamp(min=1e-300)
                measured["errors"][layout, method, name] = float(error)
            measured["digests"][layout, method] = digest(state.items())
            measured["placed_alike"][layout, method] = all(
                tensor.placements == place(initial_parameters()[name.removeprefix("momentum.")]).placements
                for name, tensor in state.items()
            )
    return measured


def orthogonalize_shards() -> tuple[float, float]:
    """Relative distance to Iso of the whole: of what isotropic() makes of a DTensor, and of what it makes of shards."""
    matrix = awkward_matrices(seed=1)["tall"]
    sharded = shard(matrix, init_device_mesh("cpu", (2,)), (Shard(0),))
    exact = isotropic(matrix)
    by_shard = DTensor.from_local(isotropic(sharded.to_local()), sharded.device_mesh, sharded.placements)
    return tuple(float((each.full_tensor() - exact).norm() / exact.norm()) for each in (isotropic(sharded), by_shard))


def step_of_a_model() -> list[dict]:
    """Of a model under real FSDP2 × tensor parallelism, even and uneven: errors of one step, lengths of its directions.

    Directions are the singular vectors of the pseudo-gradient, lengths relative to the mean of its singular values.
    """
    found = []
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    for inner, middle, outer in ((8, 16, 8), (10, 14, 7), (5, 13, 65), (4, 3, 6)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(inner, middle, bias=False), nn.Linear(middle, outer), nn.LayerNorm(outer))
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        deltas = {name: torch.randn_like(parameter) for name, parameter in model.named_parameters()}
        whole = {name: parameter.clone() for name, parameter in before.items()}
        for name, parameter in whole.items():
            parameter.grad = deltas[name]
        OuterOptimizer(whole.items(), lr=0.7, momentum=0.8, isotropic="svd").step()

        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel(), "2": SequenceParallel()})
        fully_shard(model, mesh=mesh["dp_shard"])
        for name, parameter in model.named_parameters():
            parameter.grad = shard(deltas[name], parameter.device_mesh, parameter.placements)
        OuterOptimizer(model.named_parameters(), lr=0.7, momentum=0.8, isotropic="svd").step()

        step: dict = {"errors": {}, "lengths": {}, "placements": {}}
        for name, parameter in model.named_parameters():
            after = parameter.full_tensor().detach()
            step["errors"][name] = float((after - whole[name]).norm() / whole[name].norm())
            step["placements"][name] = [type(placement).__name__ for placement in parameter.placements]
            if after.dim() == 2:
                update = (before[name] - after) / (0.7 * 1.8)  # the first step of Nesterov momentum is 1 + 0.8 long
                lengths = torch.linalg.svdvals(update) / torch.linalg.svdvals(deltas[name]).mean()
                step["lengths"][name] = lengths.tolist()
        found.append(step)
    return found


def give_nan_on_one_rank() -> str:
    matrix = torch.ones(6, 4)
    matrix[5, 3] = float("nan")
    parameter = shard(torch.ones(6, 4), init_device_mesh("cpu", (2,)), (Shard(0),))
    optimizer = OuterOptimizer([("weight", parameter)], lr=1.0, isotropic="svd")
    parameter.grad = shard(matrix, parameter.device_mesh, parameter.placements)
    with pytest.raises(ValueError, match="non-finite") as caught:
        optimizer.step()
    assert not optimizer.state[parameter]["momentum_buffer"].to_local().any()
    return str(caught.value)


def measure(world_size: int) -> dict:
    """Everything that is asked of a world of so many ranks, in one start of its processes."""
    measured = measure_outer_steps(world_size)
    if world_size == 2:
        measured["shards_alone"] = orthogonalize_shards()
        measured["nan"] = give_nan_on_one_rank()
    else:
        measured["model"] = step_of_a_model()
    return measured


@pytest.fixture(scope="module")
def worlds() -> dict[int, list[dict]]:
    """By world size, what each rank measured."""
    return {world_size: run_ranks(world_size, measure, world_size) for world_size in LAYOUTS}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("world_size", "layout"), WORLDS_AND_LAYOUTS)
def test_sharded_step_equals_the_unsharded_one(worlds, world_size: int, layout: str, method: str) -> None:
    """I19: θ and momentum after two rounds, every matrix, every rank. 1e-5 allowed."""
    for rank, measured in enumerate(worlds[world_size]):
        for case in CASES:
            for name in (case, f"momentum.{case}"):
                assert measured["errors"][layout, method, name] < 1e-5, (rank, name)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("world_size", LAYOUTS)
def test_all_ranks_and_layouts_end_with_the_same_bits(worlds, world_size: int, method: str) -> None:
    """I20: one digest of θ and momentum on all ranks, whole or sharded in any way."""
    layouts = ["whole", *LAYOUTS[world_size]]
    digests = {measured["digests"][layout, method] for measured in worlds[world_size] for layout in layouts}
    assert len(digests) == 1
    others = {worlds[world_size][0]["digests"]["whole", other] for other in METHODS if other != method}
    assert not digests & others, "the methods must differ, or equality means nothing"


@pytest.mark.parametrize(("world_size", "layout"), WORLDS_AND_LAYOUTS)
def test_parameters_and_momentum_keep_their_placement(worlds, world_size: int, layout: str) -> None:
    for measured in worlds[world_size]:
        assert all(measured["placed_alike"][layout, method] for method in METHODS)


def test_orthogonalizing_shards_would_be_another_algorithm(worlds) -> None:
    """B68: the mistake that this machinery prevents is large; a DTensor given to isotropic() itself is safe."""
    for measured in worlds[2]:
        error_whole, error_by_shard = measured["shards_alone"]
        assert error_whole < 1e-5
        assert error_by_shard > 0.1


def test_step_of_a_model_under_fsdp2_and_tensor_parallelism(worlds) -> None:
    """I19, B69: the placements are torch's choice, and all directions of the update of a matrix have one length."""
    for measured in worlds[4]:
        for step in measured["model"]:
            assert step["placements"]["0.weight"] == ["_StridedShard", "Shard"]
            assert step["placements"]["1.weight"] == ["Shard", "Shard"]
            assert step["placements"]["2.weight"] == ["Shard", "Replicate"]
            assert all(error < 1e-5 for error in step["errors"].values()), step["errors"]
            assert step["lengths"].keys() == {"0.weight", "1.weight"}
            for lengths in step["lengths"].values():
                assert lengths == pytest.approx([1.0] * len(lengths), rel=1e-4)


def test_nan_on_one_rank_is_an_error_on_every_rank(worlds) -> None:
    """Not on the rank alone that holds the bad element, which would leave the others waiting in a collective."""
    first, second = (measured["nan"] for measured in worlds[2])
    assert first == second
    assert first.startswith("weight: ")
