"""Summaries of a matrix's singular values that are cheap enough to log every round."""

import torch
from torch import Tensor

from isoloco.newton_schulz import unit_scaled

_ITERATIONS = 20


@torch.no_grad()
def stable_rank(matrix: Tensor) -> float:
    """``‖M‖_F² / σ_1²`` of one matrix (m, n): 1 for rank one, min(m, n) for an isotropic matrix, 0 for zeros.

    σ_1 comes from a short power iteration with a fixed start, so equal matrices give equal numbers. It approaches σ_1
    from below; the result is up to a few percent high where the largest singular values are close. For logs only.
    Raises ValueError for other shapes and for "non-finite" input.
    """
    if matrix.dim() != 2:
        raise ValueError(f"expected one matrix (m, n), got shape {tuple(matrix.shape)}")
    unit, largest = unit_scaled(matrix)
    if not bool((largest > 0).all()):
        return 0.0
    # random, because any fixed pattern is orthogonal to the first singular vector of some ordinary matrix
    start = torch.randn(unit.size(1), generator=torch.Generator().manual_seed(0))  # (n,)
    v = start.to(unit)
    for _ in range(_ITERATIONS):
        v = unit.mT @ (unit @ v)
        v = v / torch.linalg.vector_norm(v)
    sigma_1 = torch.linalg.vector_norm(unit @ v)
    ratio = torch.linalg.matrix_norm(unit) / sigma_1
    return min(float(ratio) ** 2, float(min(unit.shape)))
