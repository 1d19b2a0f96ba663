"""Norms and singular values of batches of matrices: right for every size of their entries, sparing with memory.

Functions on (B, m, n) take matrices that :func:`unit_scaled` has made; they are meant for
:func:`~isoloco.exact_matmuls.exact_matmuls`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# A matrix this many times longer than wide is made square by a QR decomposition before its SVD. LAPACK does the same
# inside; done here it needs one matrix-sized tensor instead of two.
_LONG = 2

# Singular values of at most so many eps times the largest are rounding: those of matrices without full rank come out at
# 2 to 5 eps for all sizes up to 2048 rows. A bound that grows with the size would take real directions for null ones.
_NULL = 16

_POWER_ITERATIONS = 20


def check_is_matrix(matrix: Tensor) -> None:
    """Raise ValueError for what is not a floating-point matrix (..., m, n)."""
    if matrix.dim() < 2 or not matrix.is_floating_point():
        raise ValueError(
            f"expected a floating-point matrix (..., m, n), got {matrix.dtype} of shape {tuple(matrix.shape)}"
        )


def largest_magnitude(tensor: Tensor, dim: int | tuple[int, ...] = ()) -> Tensor:
    """The largest |entry|, over all dims or those given (kept with size 1), without a temporary of the tensor's size.

    Raises ValueError for NaN and Inf, which have no direction.
    """
    dims = dim or tuple(range(tensor.dim()))
    largest = torch.maximum(tensor.amax(dims, keepdim=True), -tensor.amin(dims, keepdim=True))  # NaN and Inf propagate
    if not bool(torch.isfinite(largest).all()):
        raise ValueError(f"non-finite values in a tensor of shape {tuple(tensor.shape)}: NaN or Inf has no direction")
    return largest


def unit_scaled(matrix: Tensor, *, overwrite: bool = False) -> tuple[Tensor, Tensor]:
    """Split ``matrix`` (..., m, n) into a matrix of largest magnitude 1 and that magnitude (..., 1, 1).

    Both come back in fp32 (fp64 for fp64 input). Squares of the scaled entries neither overflow nor vanish, so norms
    and singular values of a matrix of size 1e-20 or 1e20 are as exact as those of any other. A zero matrix has
    magnitude 0 and stays zero. The scaled matrix is new memory or, with ``overwrite`` and no need to change the dtype,
    that of ``matrix``. Raises ValueError for what is not a floating-point matrix and for NaN or Inf.
    """
    check_is_matrix(matrix)
    dtype = torch.promote_types(matrix.dtype, torch.float32)
    if matrix.numel() == 0:
        return matrix.to(dtype), matrix.new_zeros(*matrix.shape[:-2], 1, 1, dtype=dtype)
    largest = largest_magnitude(matrix, (-2, -1)).to(dtype)
    divisor = torch.where(largest > 0, largest, 1)
    if overwrite and matrix.dtype == dtype:
        return matrix.div_(divisor), largest
    return torch.div(matrix, divisor), largest


def frobenius_norm(matrix: Tensor) -> Tensor:
    """‖M‖_F of (B, m, n), as (B, 1, 1)."""
    # By rows first: over all entries at once, torch's fp32 sum is 0.2 % off for 32000 x 1024.
    return torch.linalg.vector_norm(torch.linalg.vector_norm(matrix, dim=-1), dim=-1)[..., None, None]


def inner_product(a: Tensor, b: Tensor) -> Tensor:
    """⟨A, B⟩ of two (B, m, n), as (B, 1, 1)."""
    return torch.linalg.vecdot(a, b).sum(-1)[..., None, None]


def short_by_long(matrix: Tensor) -> Tensor:
    """(B, m, n) as (B, r, n) with r ≤ n: itself, or a transposed view."""
    return matrix.mT if matrix.size(-2) > matrix.size(-1) else matrix


# ---- singular value decomposition ----


@dataclass(frozen=True)
class ThinSVD:
    """The singular value decomposition of (B, m, n) matrices, r = min(m, n); see :func:`thin_svd`."""

    sigma: Tensor
    """(B, r), descending."""
    _basis: Tensor | None  # (B, long, r) with orthonormal columns; None stands for the identity
    _left: Tensor  # (B, r or long, r)
    _right: Tensor  # (B, r, r)
    _is_wide: bool

    @property
    def kept(self) -> Tensor:
        """(B, r): False for null directions, σ_k ≤ 16 · eps · σ_1.

        What LAPACK returns as their singular vectors is arbitrary and differs between libraries.
        """
        eps = torch.finfo(self.sigma.dtype).eps
        return self.sigma > _NULL * eps * self.sigma[..., :1]

    def top(self, k: int) -> tuple[Tensor, Tensor, Tensor]:
        """The k largest: U (B, m, k), σ (B, k), V (B, n, k), new memory; singular vectors of null ones are zero."""
        kept = self.kept[..., None, :k]
        left = self._left[..., :k] * kept
        if self._basis is not None:
            left = self._basis @ left
        right = self._right.mT[..., :k] * kept
        sigma = self.sigma[..., :k].clone()
        return (right, sigma, left) if self._is_wide else (left, sigma, right)

    def with_sigma(self, sigma: Tensor, *, out: Tensor | None = None) -> Tensor:
        """The matrices (B, m, n) with the same singular vectors and other singular values ``sigma`` (B, r)."""
        scaled = self._left * sigma.unsqueeze(-2)
        factors = (scaled, self._right) if self._basis is None else (self._basis, scaled @ self._right)
        if self._is_wide:
            factors = (factors[1].mT, factors[0].mT)
        return torch.matmul(*factors, out=out)


def thin_svd(matrix: Tensor) -> ThinSVD:
    """Decompose (B, m, n) matrices, which stay as they are. Needs about one more matrix-sized tensor."""
    is_wide = matrix.size(-2) < matrix.size(-1)
    tall = matrix.mT if is_wide else matrix
    basis = None
    if tall.size(-2) >= _LONG * tall.size(-1):
        basis, tall = torch.linalg.qr(tall)
    try:
        U, S, Vt = torch.linalg.svd(tall, full_matrices=False)
    except torch.linalg.LinAlgError:
        # the fast drivers of an accelerator can fail to converge; fp64 LAPACK on the same matrix is the slow way out
        U, S, Vt = (part.to(tall) for part in torch.linalg.svd(tall.double().cpu(), full_matrices=False))
    return ThinSVD(S, basis, U, Vt, is_wide)


# ---- stable rank ----


def stable_rank_of_spectrum(sigma: Tensor) -> Tensor:
    """‖M‖_F² / σ_1² from all singular values (B, r), in any order; (B,)."""
    largest = sigma.amax(dim=-1, keepdim=True)
    return (sigma / torch.where(largest > 0, largest, 1)).square().sum(-1)


def stable_rank_of_gram(times_gram: Callable[[Tensor], Tensor], norm: Tensor, size: int) -> Tensor:
    """‖M‖_F² / σ_1² (B,) from products with the smaller Gram matrix, and the norm (B, 1, 1).

    ``times_gram`` multiplies ``M Mᵀ`` or ``Mᵀ M``, whichever is ``size`` x ``size``, by vectors (B, size, 1).
    σ_1 comes from a short power iteration with a fixed start, so equal matrices give equal numbers. It approaches σ_1
    from below; the result is up to a few percent high where the largest singular values are close. For logs only.
    """
    # random, because any fixed pattern is orthogonal to the first singular vector of some ordinary matrix
    start = torch.randn(size, generator=torch.Generator().manual_seed(0))
    v = start.to(norm)[:, None].expand(norm.size(0), size, 1)
    for _ in range(_POWER_ITERATIONS):
        v = v / _at_least_tiny(torch.linalg.vector_norm(v, dim=-2, keepdim=True))
        w = times_gram(v)
        square = (v.mT @ w).squeeze(-1).squeeze(-1)  # the Rayleigh quotient, (B,)
        v = w
    ratio = norm.flatten().square() / _at_least_tiny(square)
    return torch.where(square > 0, ratio.clamp(max=size), 0)


def _at_least_tiny(value: Tensor) -> Tensor:
    return value.clamp(min=torch.finfo(value.dtype).tiny)


def stable_rank_of_matrix(matrix: Tensor) -> Tensor:
    """‖M‖_F² / σ_1² (B,) of (B, m, n) matrices by :func:`stable_rank_of_gram`."""
    X = short_by_long(matrix)
    return stable_rank_of_gram(lambda v: X @ (X.mT @ v), frobenius_norm(matrix), X.size(-2))
