"""Gaussian matrices of the shapes that the models have, and what an exact SVD makes of them."""

import functools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from recipes.model import Llama
from recipes.model_shape import FLAVORS
from tools.benchmark.measured_runs import progress

Shape = tuple[int, int]


def model_matrices(model: str) -> Counter[Shape]:
    """Shape -> how many matrices of it the model has, the cheapest first."""
    shapes = Counter(shape for shape in parameter_shapes(model).values() if len(shape) == 2)
    return Counter({shape: shapes[shape] for shape in sorted(shapes, key=num_operations)})


@functools.cache
def parameter_shapes(model: str) -> dict[str, Any]:
    with torch.device("meta"):
        return {name: tuple(parameter.shape) for name, parameter in Llama(FLAVORS[model]).named_parameters()}


def num_operations(shape: Sequence[int]) -> float:
    """Of five iterations of the plain form on one matrix: 20 r² n + 10 r³."""
    r, longer = sorted(shape)
    return 20 * r * r * longer + 10 * r**3


@functools.cache
def gaussian(shape: Shape) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(math.prod(shape)))


@functools.cache
def reference(shape: Shape) -> tuple[Tensor, Tensor]:
    """U Vᵀ of :func:`gaussian` and its singular values, by an SVD in float64."""
    progress(f"{name_of(shape)}: SVD in float64")
    U, S, Vt = torch.linalg.svd(gaussian(shape).double(), full_matrices=False)
    return (U @ Vt).float(), S


def relative_error(result: Tensor, exact: Tensor) -> float:
    return float((result.double() - exact.double()).norm() / exact.double().norm())


def batch_of(matrix: Tensor, size: int) -> Tensor:
    """(size, m, n): the matrix with its rows rotated. What an SVD makes of them is rotated alike."""
    return torch.stack([matrix.roll(number, 0) for number in range(size)])


def name_of(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))
