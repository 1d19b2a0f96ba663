"""Make a matrix isotropic: keep its singular directions, give all of them the same length (IsoLoCo, Algorithm 2)."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from isoloco.newton_schulz import coefficient_triples, exact_matmuls, newton_schulz, unit_scaled
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


def _thin_svd(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    try:
        U, S, Vt = torch.linalg.svd(matrix, full_matrices=False)
    except torch.linalg.LinAlgError:
        # the fast drivers of an accelerator can fail to converge; fp64 LAPACK on the same matrix is the slow way out
        U, S, Vt = (part.to(matrix) for part in torch.linalg.svd(matrix.double().cpu(), full_matrices=False))
    return U, S, Vt


@torch.no_grad()
def isotropic(
    matrix: Tensor,
    *,
    orthogonalizer: str = "svd",
    scale: str = "mean",
    clip: str | None = None,
    coefficients: str = "dion",
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

    Zeros give zeros. Null directions (σ_k ≤ r · eps · σ_1) become zero: what LAPACK returns for them is arbitrary and
    differs between libraries. A matrix with a single row or column has one singular value and is returned unchanged.
    Raises ValueError for bad options and for "non-finite" input.
    """
    check_isotropic_options(orthogonalizer, scale, clip, coefficients)
    if isinstance(matrix, DTensor):
        return apply_to_whole(
            matrix,
            lambda whole: isotropic(
                whole, orthogonalizer=orthogonalizer, scale=scale, clip=clip, coefficients=coefficients
            ),
        )
    unit, largest = unit_scaled(matrix)  # matrix = largest · unit
    rows, cols = matrix.shape[-2:]
    r = min(rows, cols)
    if r <= 1:
        return matrix.clone()

    sigma = None  # (..., r)
    with exact_matmuls(matrix.device):
        if orthogonalizer == "svd":
            U, sigma, Vt = _thin_svd(unit)
            kept = sigma > r * torch.finfo(sigma.dtype).eps * sigma[..., :1]
            if clip is not None:
                mean = sigma.mean(dim=-1, keepdim=True)
                clipped = torch.minimum(sigma, mean) if clip == "high" else torch.maximum(sigma, mean)
                result = (U * (clipped * kept).unsqueeze(-2)) @ Vt
                return (result * largest).to(matrix.dtype)
            directions = (U * kept.unsqueeze(-2)) @ Vt  # (..., m, n)
        else:
            directions = newton_schulz(unit, coefficients=coefficients)

    if scale == "spectral":
        return (directions * (rows / cols) ** 0.5).to(matrix.dtype)
    if scale == "mean":
        if sigma is None:
            sigma = torch.linalg.svdvals(unit)
        length = sigma.mean(dim=-1)[..., None, None]  # (..., 1, 1)
    elif scale == "rms":
        length = torch.linalg.matrix_norm(unit, keepdim=True) / r**0.5
    else:
        length = (directions * unit).sum(dim=(-2, -1), keepdim=True) / r
    return (directions * length * largest).to(matrix.dtype)
