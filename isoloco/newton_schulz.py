"""Newton–Schulz iteration: the orthogonal factor of a matrix from matrix products alone, without an SVD."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from isoloco.whole_matrix import apply_to_whole

Triple = tuple[float, float, float]

# One (a, b, c) per iteration of x -> a x + b x^3 + c x^5 on every singular value.
COEFFICIENTS: dict[str, tuple[Triple, ...]] = {
    # microsoft/dion, zeropower_via_newtonschulz5, which IsoLoCo 4.3 cites; pinned, because later versions differ
    "dion": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    # Polar Express (arXiv 2505.16932) as microsoft/dion ships it
    "polar_express": (
        (8.156554524902461, -22.48329292557795, 15.878769915207462),
        (4.042929935166739, -2.808917465908714, 0.5000178451051316),
        (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
        (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
        (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
    ),
    # KellerJordan/Muon: one triple for every iteration
    "muon": ((3.4445, -4.7750, 2.0315),),
}

# Polar Express diverges for a singular value above 1, which rounding can give; the others are stable there.
SAFETY = {"dion": 1.0, "polar_express": 1.02, "muon": 1.0}


def coefficient_triples(coefficients: str, steps: int) -> tuple[Triple, ...]:
    """The triples of the first ``steps`` iterations; ``"muon"`` repeats its only one. ValueError for anything else."""
    if coefficients not in COEFFICIENTS:
        raise ValueError(f"coefficients={coefficients!r} is unknown: use one of {', '.join(map(repr, COEFFICIENTS))}")
    triples = COEFFICIENTS[coefficients]
    if steps < 1:
        raise ValueError(f"steps={steps}: Newton–Schulz needs at least one iteration")
    if len(triples) == 1:
        return triples * steps
    if steps > len(triples):
        raise ValueError(f"steps={steps}: the {coefficients!r} set has only {len(triples)} iterations")
    return triples[:steps]


def unit_scaled(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Split ``matrix`` (..., m, n) into a matrix of largest magnitude 1 and that magnitude (..., 1, 1).

    Both come back in fp32 (fp64 for fp64 input). Squares of the scaled entries neither overflow nor vanish, so norms
    and singular values of a matrix of size 1e-20 or 1e20 are as exact as those of any other. A zero matrix has
    magnitude 0 and stays zero. Raises ValueError for what is not a floating-point matrix and for NaN or Inf.
    """
    if matrix.dim() < 2 or not matrix.is_floating_point():
        raise ValueError(
            f"expected a floating-point matrix (..., m, n), got {matrix.dtype} of shape {tuple(matrix.shape)}"
        )
    matrix = matrix.to(torch.promote_types(matrix.dtype, torch.float32))
    if matrix.numel() == 0:
        return matrix, matrix.new_zeros(*matrix.shape[:-2], 1, 1)
    largest = matrix.abs().amax(dim=(-2, -1), keepdim=True)  # (..., 1, 1); NaN and Inf propagate
    if not bool(torch.isfinite(largest).all()):
        raise ValueError(f"non-finite values in a matrix of shape {tuple(matrix.shape)}: NaN or Inf has no direction")
    return matrix / torch.where(largest > 0, largest, 1), largest


@contextmanager
def exact_matmuls(device: torch.device) -> Iterator[None]:
    """Inside, matrix products keep the dtype of their operands: no autocast, no TF32 or bf16 in place of fp32."""
    # not torch.set_float32_matmul_precision: its getter raises in a program that has set one of these
    backends = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    before = [backend.fp32_precision for backend in backends]
    try:
        for backend in backends:
            backend.fp32_precision = "ieee"
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision


@torch.no_grad()
def newton_schulz(
    matrix: Tensor, *, coefficients: str = "dion", steps: int = 5, dtype: torch.dtype | None = None
) -> Tensor:
    """Approximate ``U Vᵀ`` of ``matrix = U diag(σ) Vᵀ`` (IsoLoCo 4.3; Muon).

    ``matrix`` has shape (..., m, n): a batch is so many independent matrices. The result has its shape and dtype.
    All singular values become about 1, except those below about 1e-3 of the Frobenius norm, which stay smaller:
    null directions stay null and a zero matrix stays zero. A DTensor is brought whole first.

    ``coefficients``: ``"dion"`` | ``"polar_express"`` | ``"muon"``; ``steps`` uses the first so many triples of the
    set (at most 5; ``"muon"`` repeats its one). ``dtype`` is that of the iteration; None: fp32 on CPU, bf16 on
    accelerators, fp64 for fp64 input. The norm is taken in fp32 at least, whatever ``dtype``, so the result does not
    depend on the scale of the input. Raises ValueError for bad arguments and for "non-finite" input.
    """
    triples = coefficient_triples(coefficients, steps)
    if isinstance(matrix, DTensor):
        return apply_to_whole(
            matrix, lambda whole: newton_schulz(whole, coefficients=coefficients, steps=steps, dtype=dtype)
        )
    X, _ = unit_scaled(matrix)
    if X.numel() == 0:
        return matrix.clone()
    norm = torch.linalg.matrix_norm(X, keepdim=True)  # (..., 1, 1)
    X = X / torch.where(norm > 0, norm * SAFETY[coefficients], 1)

    if dtype is None:
        on_host = X.device.type == "cpu"
        dtype = X.dtype if on_host or X.dtype == torch.float64 else torch.bfloat16
    X = X.to(dtype).reshape(-1, *X.shape[-2:])  # (B, m, n)

    # the smaller Gram matrix is the cheaper one
    tall = X.size(-2) > X.size(-1)
    if tall:
        X = X.mT
    with exact_matmuls(X.device):
        for a, b, c in triples:
            # Fused, because each product is then rounded to dtype once, after the sum: halves the error of bf16.
            A = X @ X.mT  # (B, r, r)
            X = torch.baddbmm(X, torch.baddbmm(A, A, A, beta=b, alpha=c), X, beta=a)
    if tall:
        X = X.mT
    return X.reshape(matrix.shape).to(matrix.dtype).contiguous()
