"""Norms, singular values and stable ranks, of matrices of every size."""

import itertools

import pytest
import torch

from isoloco.isotropic import isotropic
from isoloco.spectrum import (
    frobenius_norm,
    inner_product,
    largest_magnitude,
    stable_rank_of_matrix,
    stable_rank_of_spectrum,
    thin_svd,
    unit_scaled,
)

SHAPES = [(2, 5, 3), (1, 3, 5), (3, 8, 8), (1, 100, 20), (2, 20, 100), (1, 1, 7), (1, 40, 20)]


def gaussian(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("scale", [1e-44, 1e-20, 1.0, 1e20, 1e37])
def test_unit_scaled_splits_a_matrix_into_entries_up_to_one_and_their_size(scale: float) -> None:
    matrix = gaussian(2, 6, 4) * scale
    unit, largest = unit_scaled(matrix)
    assert torch.equal(unit.abs().amax((1, 2)), torch.ones(2))
    torch.testing.assert_close(unit * largest, matrix, rtol=1e-6, atol=1e-45)


def test_unit_scaled_keeps_zeros_and_widens_half_precision() -> None:
    unit, largest = unit_scaled(torch.zeros(3, 4, 5, dtype=torch.bfloat16))
    assert torch.equal(unit, torch.zeros(3, 4, 5))
    assert torch.equal(largest, torch.zeros(3, 1, 1))


def test_unit_scaled_overwrites_only_on_request() -> None:
    matrix = gaussian(4, 5)
    before = matrix.clone()
    unit, _ = unit_scaled(matrix)
    assert torch.equal(matrix, before)
    in_place, _ = unit_scaled(matrix, overwrite=True)
    assert in_place.data_ptr() == matrix.data_ptr()
    assert torch.equal(matrix, unit)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_values_are_named(bad: float) -> None:
    tensor = gaussian(3, 4, 5)
    tensor[1, 2, 3] = bad
    for dim in ((), (-2, -1)):
        with pytest.raises(ValueError, match="non-finite"):
            largest_magnitude(tensor, dim)


def test_norm_of_millions_of_entries() -> None:
    """torch's own is off by 1e-4 and more here: its fp32 sum over all entries loses digits."""
    matrix = gaussian(4096, 4096)[None]
    assert frobenius_norm(matrix).item() == pytest.approx(matrix.double().norm().item(), rel=1e-6)
    assert inner_product(matrix, matrix).item() == pytest.approx(matrix.double().norm().item() ** 2, rel=1e-6)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_thin_svd(shape: tuple[int, int, int], dtype: torch.dtype, tolerance: float) -> None:
    """Whatever the shape: σ of torch's, the singular vectors orthonormal, and together the matrix again."""
    matrix = gaussian(*shape, dtype=dtype)
    before = matrix.clone()
    svd, r = thin_svd(matrix), min(shape[1:])
    torch.testing.assert_close(svd.sigma, torch.linalg.svdvals(matrix), rtol=tolerance, atol=tolerance)
    assert relative_error(svd.with_sigma(svd.sigma), matrix) < tolerance
    U, sigma, V = svd.top(r)
    for vectors in (U, V):
        assert relative_error(vectors.mT @ vectors, torch.eye(r).expand(shape[0], r, r)) < tolerance
    assert relative_error((U * sigma.unsqueeze(-2)) @ V.mT, matrix) < tolerance
    k = max(1, r // 2)
    for part, whole in zip(svd.top(k), (U, sigma, V), strict=True):
        torch.testing.assert_close(part, whole[..., :k])
    out = torch.empty_like(matrix)
    assert svd.with_sigma(svd.sigma, out=out).data_ptr() == out.data_ptr()
    assert torch.equal(matrix, before)


@pytest.mark.parametrize("shape", [(40, 30), (30, 40), (100, 30), (30, 100)])
def test_null_directions_have_no_singular_vectors(shape: tuple[int, int]) -> None:
    matrix = (gaussian(shape[0], 5) @ gaussian(5, shape[1], seed=1))[None]
    svd = thin_svd(matrix)
    assert svd.kept.tolist() == [[True] * 5 + [False] * 25]
    U, _, V = svd.top(8)
    for vectors in (U, V):
        assert torch.equal(vectors[..., 5:], torch.zeros_like(vectors[..., 5:]))
    assert not thin_svd(torch.zeros(1, *shape)).kept.any()


def stable_rank(matrix: torch.Tensor) -> float:
    unit, _ = unit_scaled(matrix)
    return stable_rank_of_matrix(unit[None]).item()


def test_stable_rank() -> None:
    """‖M‖_F²/σ_1²: 1 for rank one, r for an isotropic matrix, 0 for zeros, within 5 % of the exact one otherwise."""
    assert stable_rank(torch.zeros(4, 6)) == 0
    assert stable_rank(torch.outer(gaussian(9), gaussian(5))) == pytest.approx(1, rel=1e-5)
    assert stable_rank(isotropic(gaussian(24, 40))) == pytest.approx(24, rel=1e-4)
    for matrix, scale in itertools.product(
        (gaussian(100, 60), torch.diag(1 / torch.arange(1, 61))), (1.0, 1e-25, 1e25)
    ):
        sigma = torch.linalg.svdvals(matrix)
        exact = stable_rank_of_spectrum(sigma[None]).item()
        assert exact == pytest.approx((sigma.square().sum() / sigma[0] ** 2).item(), rel=1e-5)
        assert exact * 0.9999 < stable_rank(matrix * scale) < exact * 1.05
    assert stable_rank(gaussian(50, 30)) == stable_rank(gaussian(50, 30)), "the same matrix gives the same number"


def test_stable_ranks_of_a_batch() -> None:
    """One for each matrix; zero matrices do not disturb the others."""
    batch = torch.stack([gaussian(8, 5), torch.zeros(8, 5), torch.outer(gaussian(8), gaussian(5))])
    unit, _ = unit_scaled(batch)
    expected = torch.tensor([stable_rank(matrix) for matrix in batch])
    torch.testing.assert_close(stable_rank_of_matrix(unit), expected)
    assert stable_rank_of_spectrum(torch.linalg.svdvals(unit))[1] == 0
