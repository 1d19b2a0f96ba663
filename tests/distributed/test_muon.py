"""Muon on sharded parameters is Muon on whole ones, however they are placed (B68, B69, B72).

Two ranks and four, as FSDP2 and tensor parallelism place parameters, alone and together, shards uneven and empty. Each
world runs once for all its cases; what it measured is then judged case by case.
"""

import functools
import hashlib
import math
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from isoloco.muon import SCALES, Muon
from tests.distributed.sharded_cases import LAYOUTS, WORLDS_AND_LAYOUTS, awkward_matrices, shard
from tests.run_ranks import run_ranks

pytestmark = pytest.mark.slow

OPTIONS = {
    "plain": {},
    "nesterov": {"nesterov": True, "scale": "match_rms_adamw", "coefficients": "polar_express"},
    "fused_rows": {"split_sizes": {"layers.0.tall.weight": (50, 46), "layers.0.odd_rows.weight": (1, 64)}},
}


def gradients(seed: int) -> dict[str, Tensor]:
    named = awkward_matrices(seed)
    others = awkward_matrices(100 + seed)
    return {
        "layers.0.norm.weight": named.pop("gain"),
        **{f"layers.0.{name}.weight": matrix for name, matrix in named.items()},
        "layers.1.square.weight": others["square"],
        "output.weight": others["odd_rows"][:33, :16].contiguous(),
    }


NAMES = tuple(gradients(0))
OF_ADAMW = ("layers.0.single_row.weight", "layers.0.norm.weight", "output.weight")
STATE = ("momentum_buffer", "exp_avg", "exp_avg_sq")


def trained(place: Callable[[Tensor], Tensor], dtype: torch.dtype, options: dict) -> dict[str, Tensor]:
    """Parameters and state after three steps from zero, so that no error hides behind the size of a parameter."""
    parameters = {name: nn.Parameter(place(torch.zeros_like(each, dtype=dtype))) for name, each in gradients(0).items()}
    optimizer = Muon(parameters.items(), lr=0.5, weight_decay=0.1, **options)
    for seed in (1, 2, 3):
        for name, gradient in gradients(seed).items():
            parameters[name].grad = place(gradient.to(dtype))
        optimizer.step()
    named: dict[str, Tensor] = {name: parameter.detach() for name, parameter in parameters.items()}
    for name, parameter in parameters.items():
        state = optimizer.state[parameter]
        named |= {f"{name}.{key}": state[key] for key in STATE if key in state}
    return named


def fingerprint(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().float().numpy().tobytes()).hexdigest()


def relative_error(actual: Tensor, expected: Tensor) -> float:
    error = (actual.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-300)
    return float(error)


def make_meshes(world_size: int) -> dict[str, DeviceMesh]:
    shapes = {shape for shape, _ in LAYOUTS[world_size].values()}
    by_shape = {shape: init_device_mesh("cpu", shape) for shape in sorted(shapes)}
    return {layout: by_shape[shape] for layout, (shape, _) in LAYOUTS[world_size].items()}


def measure_placements(meshes: dict[str, DeviceMesh]) -> dict:
    """On every rank, by layout and options: errors against whole parameters by name, bits, placements."""
    measured: dict = {"errors": {}, "same_bits": {}, "fingerprints": {}, "placed_alike": {}}
    runs = [(name, torch.float32, options) for name, options in OPTIONS.items()]
    for case, dtype, options in [*runs, ("bfloat16", torch.bfloat16, {})]:
        whole = trained(lambda tensor: tensor.clone(), dtype, options)
        for layout, mesh in meshes.items():
            _, placements = LAYOUTS[mesh.size()][layout]
            place = functools.partial(shard, mesh=mesh, placements=placements)
            found = trained(place, dtype, options)
            for name, tensor in found.items():
                full = tensor.full_tensor()
                measured["errors"][layout, case, name] = relative_error(full, whole[name])
                measured["same_bits"][layout, case, name] = torch.equal(full, whole[name])
                measured["placed_alike"][layout, case, name] = tensor.placements == place(whole[name]).placements
            # ranks that hold the same shard: those with one coordinate on the axes that cut
            coordinate = mesh.get_coordinate()
            assert coordinate is not None
            position = tuple(
                index for index, placement in zip(coordinate, placements, strict=True) if not placement.is_replicate()
            )
            measured["fingerprints"][layout, case] = (
                position,
                {name: fingerprint(tensor.to_local()) for name, tensor in found.items()},
            )
    return measured


def measure_updates(meshes: dict[str, DeviceMesh]) -> dict[tuple[str, str, str], tuple[float, float]]:
    """Smallest and largest singular value of what one step with lr = 0.5 subtracts, by layout, scale and name."""
    found = {}
    for layout, mesh in meshes.items():
        _, placements = LAYOUTS[mesh.size()][layout]
        place = functools.partial(shard, mesh=mesh, placements=placements)
        for scale in SCALES:
            for name in ("layers.0.tall.weight", "layers.0.wide.weight"):
                gradient = gradients(1)[name]
                parameter = nn.Parameter(place(torch.zeros_like(gradient)))
                parameter.grad = place(gradient)
                Muon([(name, parameter)], lr=0.5, scale=scale).step()
                values = torch.linalg.svdvals(parameter.detach().full_tensor())
                found[layout, scale, name] = values.min().item(), values.max().item()
    return found


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(12, bias=False)
        self.up = nn.Linear(12, 32, bias=False)
        self.down = nn.Linear(32, 12, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(self.norm(x)).relu())


def train_layer(world_size: int) -> tuple[dict[str, Tensor], list[str]]:
    """Parameters after five steps, and how gradients are placed if tensor parallelism is all there is."""
    torch.manual_seed(0)
    model = Layer()
    if world_size > 1:
        plan = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(),
        }
        parallelize_module(model, init_device_mesh("cpu", (world_size,)), plan)
    optimizer = Muon(model.named_parameters(), lr=0.05)
    placements = []
    for step in range(5):
        tokens = torch.randn(2, 8, 12, generator=torch.Generator().manual_seed(step))
        if world_size > 1:
            model(tokens.chunk(world_size, dim=1)[dist.get_rank()]).square().mean().backward()
        else:
            model(tokens).square().mean().backward()
        placements += [str(getattr(parameter.grad, "placements", "plain")) for parameter in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return {
        name: parameter.detach().full_tensor() if isinstance(parameter, DTensor) else parameter.detach()
        for name, parameter in model.named_parameters()
    }, placements


def work_of_each_rank(world_size: int) -> tuple[int, int]:
    """How many matrices this rank orthogonalised in one step, of how many."""
    place = functools.partial(shard, mesh=init_device_mesh("cpu", (world_size,)), placements=(Shard(0),))
    parameters = [(f"layers.{index}.weight", nn.Parameter(place(torch.zeros(32, 16)))) for index in range(8)]
    optimizer = Muon(parameters)
    for index, (_, parameter) in enumerate(parameters):
        parameter.grad = place(torch.randn(32, 16, generator=torch.Generator().manual_seed(index)))
    optimizer.step()
    return optimizer._engine.num_matrices, len(parameters)


def give_bad_gradient() -> dict[str, bool]:
    """Whether each parameter is still finite, on this rank, after one element of one gradient was not."""
    place = functools.partial(shard, mesh=init_device_mesh("cpu", (2,)), placements=(Shard(0),))
    parameters = {name: nn.Parameter(place(torch.zeros(6, 4))) for name in ("layers.0.weight", "layers.1.weight")}
    optimizer = Muon(parameters.items())
    bad = torch.ones(6, 4)
    bad[5, 3] = math.nan
    parameters["layers.0.weight"].grad = place(bad)
    parameters["layers.1.weight"].grad = place(torch.ones(6, 4))
    optimizer.step()
    return {name: bool(each.detach().to_local().isfinite().all()) for name, each in parameters.items()}


def measure(world_size: int) -> dict:
    """Everything that is asked of a world of so many ranks, in one start of its processes."""
    meshes = make_meshes(world_size)
    measured = measure_placements(meshes) | {"singular_values": measure_updates(meshes)}
    measured["layer"] = train_layer(world_size)
    measured["work"] = work_of_each_rank(world_size)
    if world_size == 2:
        measured["bad_gradient"] = give_bad_gradient()
    return measured


@pytest.fixture(scope="module")
def worlds() -> dict[int, list[dict]]:
    """By world size, what each rank measured."""
    return {world_size: run_ranks(world_size, measure, world_size) for world_size in LAYOUTS}


@pytest.mark.parametrize("case", [*OPTIONS, "bfloat16"])
@pytest.mark.parametrize(("world_size", "layout"), WORLDS_AND_LAYOUTS)
def test_sharded_parameters_are_trained_like_whole_ones(worlds, world_size: int, layout: str, case: str) -> None:
    """B68, B72: parameters and state after three steps, every shape, every rank. 1e-5 allowed, equal bits found."""
    for rank, measured in enumerate(worlds[world_size]):
        for name in NAMES:
            assert measured["errors"][layout, case, name] < 1e-5, (rank, name)
        for name in set(NAMES) - set(OF_ADAMW):
            assert measured["errors"][layout, case, f"{name}.momentum_buffer"] < 1e-5, (rank, name)
            assert measured["same_bits"][layout, case, name], (rank, name)


@pytest.mark.parametrize("case", [*OPTIONS, "bfloat16"])
@pytest.mark.parametrize(("world_size", "layout"), WORLDS_AND_LAYOUTS)
def test_ranks_that_hold_the_same_shard_hold_the_same_bits(worlds, world_size: int, layout: str, case: str) -> None:
    by_position: dict = {}
    for measured in worlds[world_size]:
        position, fingerprints = measured["fingerprints"][layout, case]
        by_position.setdefault(position, []).append(fingerprints)
    assert all(fingerprints == same[0] for same in by_position.values() for fingerprints in same)
    replicas = 2 if "replicated" in layout else 1
    assert [len(same) for same in by_position.values()] == [replicas] * (world_size // replicas)


@pytest.mark.parametrize(("world_size", "layout"), WORLDS_AND_LAYOUTS)
def test_parameters_and_state_keep_their_placement(worlds, world_size: int, layout: str) -> None:
    for measured in worlds[world_size]:
        assert all(alike for (each, *_), alike in measured["placed_alike"].items() if each == layout)


@pytest.mark.parametrize(("world_size", "layout"), WORLDS_AND_LAYOUTS)
def test_all_singular_values_of_an_update_are_the_scale(worlds, world_size: int, layout: str) -> None:
    """B69: lr · s · [0.97, 1.04] with lr = 0.5, of matrices 96 x 64 and 64 x 96."""
    for measured in worlds[world_size]:
        for scale, size in SCALES.items():
            for name, shape in (("layers.0.tall.weight", (96, 64)), ("layers.0.wide.weight", (64, 96))):
                smallest, largest = measured["singular_values"][layout, scale, name]
                assert 0.97 < smallest / (0.5 * size(*shape)) <= largest / (0.5 * size(*shape)) < 1.04


@pytest.mark.parametrize("world_size", LAYOUTS)
def test_each_matrix_is_orthogonalised_once(worlds, world_size: int) -> None:
    assert [measured["work"] for measured in worlds[world_size]] == [(8 // world_size, 8)] * world_size


@pytest.mark.parametrize("world_size", LAYOUTS)
def test_gradients_that_tensor_parallelism_left_unsummed_are_summed(worlds, world_size: int) -> None:
    expected, _ = train_layer(1)
    for measured in worlds[world_size]:
        found, placements = measured["layer"]
        assert any("Partial" in each for each in placements), "torch sums them by itself: this case is gone"
        for name, tensor in expected.items():
            assert relative_error(found[name], tensor) < 1e-5, name


def test_a_bad_gradient_leaves_no_rank_waiting(worlds) -> None:
    for measured in worlds[2]:
        assert measured["bad_gradient"] == {"layers.0.weight": False, "layers.1.weight": True}
