"""Make a matrix isotropic: keep its singular directions, give all of them the same length (IsoLoCo, Algorithm 2)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from isoloco.exact_matmuls import exact_matmuls
from isoloco.newton_schulz import coefficient_triples, divide_by_norm, independent, orthogonalize
from isoloco.spectrum import check_is_matrix, largest_magnitude, stable_rank_of_spectrum, thin_svd, unit_scaled
from isoloco.whole_matrix import apply_to_whole

ORTHOGONALIZERS = ("svd", "newton_schulz")
SCALES = ("mean", "rms", "nuclear", "spectral")
CLIPS = (None, "high", "low")


def check_isotropic_options(orthogonalizer: str, scale: str, clip: str | None, coefficients: str) -> None:
    """Raise ValueError, naming the option, for values or combinations that :func:`isotropic` does not have."""
    options = (("orthogonalizer", orthogonalizer, ORTHOGONALIZERS), ("scale", scale, SCALES), ("clip", clip, CLIPS))
    for option, value, allowed in options:
        if value not in allowed:
            raise ValueError(f"{option}={value!r} is unknown: use one of {', '.join(map(repr, allowed))}")
    coefficient_triples(coefficients, steps=1)
    if clip is not None and orthogonalizer != "svd":
        raise ValueError(f"clip={clip!r} needs the singular values: use it with orthogonalizer='svd'")
    if clip is not None and scale != "mean":
        raise ValueError(f"clip={clip!r} clips at the mean singular value: use it with scale='mean', not {scale!r}")


@torch.no_grad()
def isotropic(
    matrix: Tensor,
    *,
    orthogonalizer: str = "svd",
    scale: str = "mean",
    clip: str | None = None,
    coefficients: str = "dion",
    split_sizes: Sequence[int] | None = None,
) -> Tensor:
    """``s · U Vᵀ`` of ``matrix = U diag(σ) Vᵀ``: same singular directions, one common length ``s``.

    ``matrix`` has shape (..., m, n), a batch is so many independent matrices; the result has its shape and dtype.
    Computed in fp32 (fp64 for fp64 input). A DTensor is brought whole first. With r = min(m, n):

    ``orthogonalizer``: ``"svd"`` is exact (IsoLoCo, Algorithm 2); ``"newton_schulz"`` is the fast version (IsoLoCo
    4.3) with the ``coefficients`` of :func:`~isoloco.newton_schulz.newton_schulz`.

    ``scale``: ``"mean"`` the mean of all r singular values, zeros included (with Newton–Schulz this computes the
    singular values after all, so it is slow); ``"rms"`` ``‖M‖_F / √r``, IsoLoCo's fast version, never below the mean;
    ``"nuclear"`` ``⟨U Vᵀ, M⟩ / r``, the mean without an SVD; ``"spectral"`` ``√(m / n)``, whatever the size of M.

    ``clip`` (SVD only, scale ``"mean"``): ``"high"`` shortens the singular values above the mean to the mean, ``"low"``
    lengthens those below it, and the rest stay as they are (IsoLoCo 4.5).

    ``split_sizes``: the matrix is fused of blocks with so many rows (q | k | v), each a matrix of its own.

    Zeros give zeros. Null directions (σ_k ≤ 16 · eps · σ_1) become zero: what LAPACK returns for them is arbitrary and
    differs between libraries. A matrix with a single row or column has one singular value and is returned unchanged.
    On the CPU a batch gives the bits of its matrices one by one. Raises ValueError for bad options and for "non-finite"
    input.
    """

    def whole(matrix: Tensor) -> Tensor:
        return make_isotropic(
            matrix,
            orthogonalizer=orthogonalizer,
            scale=scale,
            clip=clip,
            coefficients=coefficients,
            split_sizes=split_sizes,
        ).matrix

    if isinstance(matrix, DTensor):
        check_isotropic_options(orthogonalizer, scale, clip, coefficients)
        return apply_to_whole(matrix, whole)
    return whole(matrix)


@dataclass(frozen=True)
class Isotropic:
    """An isotropic matrix, and the stable rank ``‖M‖_F² / σ_1²`` of what it was made from and of itself.

    These have the leading dims (...) of the matrix, and one more for the blocks if it has ``split_sizes``. With
    Newton–Schulz they are estimates, up to a few percent high; with the SVD, exact. Zero matrices have 0.
    """

    matrix: Tensor
    stable_rank_before: Tensor | None
    stable_rank_after: Tensor | None


@torch.no_grad()
def make_isotropic(
    matrix: Tensor,
    *,
    orthogonalizer: str = "svd",
    scale: str = "mean",
    clip: str | None = None,
    coefficients: str = "dion",
    split_sizes: Sequence[int] | None = None,
    overwrite: bool = False,
    with_stable_rank: bool = False,
) -> Isotropic:
    """:func:`isotropic` of a plain tensor, for callers that own it and want to know more.

    ``overwrite``: the result lies in the memory of ``matrix`` (which must be contiguous, and has no defined content
    after an error). Beside it there is at any time at most one more tensor of the size of one matrix (of the batch, on
    accelerators; two more with the SVD if it is less than twice as long as wide) and a few of r x r.
    ``with_stable_rank`` fills in the stable ranks.
    """
    check_isotropic_options(orthogonalizer, scale, clip, coefficients)
    check_is_matrix(matrix)
    rows = [matrix.size(-2)] if split_sizes is None else list(split_sizes)
    if sum(rows) != matrix.size(-2) or min(rows) < 1 <= matrix.size(-2):
        raise ValueError(
            f"split_sizes={rows} do not cut the {matrix.size(-2)} rows of a matrix of shape {tuple(matrix.shape)}"
        )
    assert not overwrite or matrix.is_contiguous()
    result = matrix if overwrite else matrix.clone(memory_format=torch.contiguous_format)

    leading = matrix.shape[:-2] if split_sizes is None else (*matrix.shape[:-2], len(rows))
    ranks = []  # (2, B, blocks) of each part of the batch
    for part in independent(result):
        of_blocks = [
            _make_isotropic_in_place(block, orthogonalizer, scale, clip, coefficients, with_stable_rank)
            for block in part.split(rows, dim=-2)
        ]
        ranks.append(torch.stack(of_blocks, dim=-1))
    if not with_stable_rank:
        return Isotropic(result, None, None)
    if not ranks:
        ranks = [torch.zeros(2, math.prod(matrix.shape[:-2]), len(rows), device=matrix.device)]
    before, after = torch.cat(ranks, dim=1).view(2, *leading)
    return Isotropic(result, before, after)


def _make_isotropic_in_place(
    matrix: Tensor, orthogonalizer: str, scale: str, clip: str | None, coefficients: str, with_stable_rank: bool
) -> Tensor:
    """Make (B, m, n) isotropic. Returns the stable ranks before and after, (2, B); zeros if they are not wanted."""
    m, n = matrix.shape[-2:]
    r = min(m, n)
    if r == 1:
        largest = largest_magnitude(matrix, (-2, -1)).flatten()
        return (largest > 0).to(torch.float32).expand(2, -1)
    unit, largest = unit_scaled(matrix, overwrite=True)
    ranks = unit.new_zeros(2, unit.size(0))
    with exact_matmuls(matrix.device):
        if orthogonalizer == "svd":
            svd = thin_svd(unit)
            spectrum = _new_spectrum(svd.sigma, scale, clip, (m / n) ** 0.5) * svd.kept
            made = svd.with_sigma(spectrum, out=unit)
            if with_stable_rank:
                ranks = torch.stack([stable_rank_of_spectrum(sigma) for sigma in (svd.sigma, spectrum)])
        else:
            mean = torch.linalg.svdvals(unit).mean(-1)[..., None, None] if scale == "mean" else None
            norm = divide_by_norm(unit)
            orthogonal = orthogonalize(
                unit,
                coefficient_triples(coefficients, steps=5),
                with_inner_product=scale == "nuclear",
                with_stable_ranks=with_stable_rank,
            )
            if orthogonal.stable_ranks is not None:
                ranks = torch.stack(orthogonal.stable_ranks)
            if mean is not None:
                length = mean
            elif orthogonal.inner_product is not None:
                length = orthogonal.inner_product * norm / r
            elif scale == "rms":
                length = norm / r**0.5
            else:
                length = torch.full_like(norm, (m / n) ** 0.5)
            made = orthogonal.matrix.to(unit.dtype).mul_(length)
    # one after the other, because the length of a huge matrix may not be a number where its entries still are
    torch.mul(made, 1 if scale == "spectral" else largest, out=matrix)
    return ranks


def _new_spectrum(sigma: Tensor, scale: str, clip: str | None, spectral: float) -> Tensor:
    """The singular values that replace ``sigma`` (B, r)."""
    if scale == "spectral":
        return torch.full_like(sigma, spectral)
    if scale == "rms":
        length = torch.linalg.vector_norm(sigma, dim=-1, keepdim=True) / sigma.size(-1) ** 0.5
    else:  # the mean of all singular values is also ⟨U Vᵀ, M⟩ / r
        length = sigma.mean(dim=-1, keepdim=True)
    if clip == "high":
        return torch.minimum(sigma, length)
    if clip == "low":
        return torch.maximum(sigma, length)
    return length.expand_as(sigma)
