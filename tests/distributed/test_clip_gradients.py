"""The gradient norm of a group is that of the whole model, whoever holds which part of it."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from recipes.clip_gradients import clip_gradients
from recipes.config import Recipe
from recipes.init_weights import initialize
from recipes.model import Llama
from recipes.model_shape import ModelShape
from recipes.parallelize import build_mesh, parallelize
from tests.run_ranks import run_ranks

SHAPE = ModelShape(vocab_size=52, dim=24, num_layers=1, num_heads=4, num_kv_heads=4, ffn_dim=36, max_seq_len=8)


def gradient_of(name: str, shape: torch.Size) -> Tensor:
    """Large for the norms, which tensor-parallel ranks replicate: to count those twice would show."""
    generator = torch.Generator().manual_seed(len(name))
    return torch.randn(shape, generator=generator) * (30.0 if len(shape) == 1 else 1.0)


def whole_norm() -> float:
    with torch.device("meta"):
        model = Llama(SHAPE)
    squares = [gradient_of(name, each.shape).double().square().sum() for name, each in model.named_parameters()]
    return math.sqrt(sum(squares))


def model_with_gradients(dp_shard: int, tp: int) -> tuple[Llama, object]:
    mesh = build_mesh(dp_shard, tp, "cpu")
    recipe = Recipe()
    recipe.training.mixed_precision_param = "float32"
    with torch.device("meta"):
        model = Llama(SHAPE)
    parallelize(model, mesh, recipe)
    initialize(model, 0, "cpu")
    for name, parameter in model.named_parameters():
        gradient = gradient_of(name, parameter.shape)
        if isinstance(parameter, DTensor):
            gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.grad = gradient
    return model, mesh


def norms_and_scales(dp_shard: int, tp: int) -> list[tuple[float, float]]:
    """For several limits: the norm returned, and by how much the gradients were scaled (one number for all, or NaN)."""
    found = []
    for max_norm in (0.0, 1e9, 5.0, 1e-6):
        model, mesh = model_with_gradients(dp_shard, tp)
        norm = clip_gradients(model.parameters(), max_norm, mesh)
        assert norm.dtype == torch.float32
        assert norm.shape == ()
        scales = []
        for name, parameter in model.named_parameters():
            after = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
            before = gradient_of(name, parameter.shape)
            scale = (after.norm() / before.norm()).item()
            torch.testing.assert_close(after, before * scale)
            scales.append(scale)
        scale = scales[0] if scales == pytest.approx([scales[0]] * len(scales), rel=1e-5) else math.nan
        found.append((norm.item(), scale))
    return found


def assert_right(found: list[tuple[float, float]]) -> None:
    norm = whole_norm()
    assert [each for each, _ in found] == pytest.approx([norm] * 4, rel=1e-6)
    assert [scale for _, scale in found] == pytest.approx([1.0, 1.0, 5.0 / norm, 1e-6 / norm], rel=1e-5)


def test_one_rank_clips_to_the_norm() -> None:
    assert_right(norms_and_scales(1, 1))


def for_layouts(layouts: list[tuple[int, int]]) -> list[list[tuple[float, float]]]:
    return [norms_and_scales(dp_shard, tp) for dp_shard, tp in layouts]


@pytest.mark.slow
@pytest.mark.parametrize("layouts", [[(2, 1), (1, 2)], [(2, 2), (4, 1), (1, 4)]], ids=["2 ranks", "4 ranks"])
def test_a_group_clips_by_the_norm_of_the_whole_model(layouts: list[tuple[int, int]]) -> None:
    by_rank = run_ranks(math.prod(layouts[0]), for_layouts, layouts)
    assert all(found == by_rank[0] for found in by_rank), "ranks would scale what they share differently"
    for found in by_rank[0]:
        assert_right(found)


def plain_parameters() -> list[nn.Parameter]:
    first, second, without = (nn.Parameter(torch.zeros(size)) for size in (2, 1, 5))
    first.grad, second.grad = torch.tensor([3.0, 0.0]), torch.tensor([4.0])
    return [first, second, without]


def test_it_returns_the_norm_before_clipping_and_skips_what_has_no_gradient() -> None:
    parameters = plain_parameters()
    assert clip_gradients(iter(parameters), 1.0, None).item() == 5.0
    torch.testing.assert_close(parameters[0].grad, torch.tensor([0.6, 0.0]))
    torch.testing.assert_close(parameters[1].grad, torch.tensor([0.8]))
    assert parameters[2].grad is None


@pytest.mark.parametrize("max_norm", [0.0, 5.1])
def test_gradients_within_the_limit_keep_every_bit(max_norm: float) -> None:
    parameters = plain_parameters()
    clip_gradients(parameters, max_norm, None)
    assert parameters[0].grad.tolist() == [3.0, 0.0]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_shows_in_the_norm(value: float) -> None:
    parameters = plain_parameters()
    parameters[1].grad.fill_(value)
    assert not math.isfinite(clip_gradients(parameters, 1.0, None).item())


def test_low_precision_gradients_are_measured_in_fp32() -> None:
    parameter = nn.Parameter(torch.zeros(10_000, dtype=torch.bfloat16))
    parameter.grad = torch.ones_like(parameter)
    assert clip_gradients([parameter], 0.0, None).item() == 100.0
