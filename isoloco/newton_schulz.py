"""Newton–Schulz iteration: the orthogonal factor of a matrix from matrix products alone, without an SVD.

There are two forms of it: the *plain* form iterates on the matrix; the *Gram* form iterates on its small Gram matrix
and applies what comes out to the matrix. They compute the same polynomials; see :func:`uses_gram_form`.
"""

import functools
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from isoloco import gram_kernels
from isoloco.exact_matmuls import exact_matmuls
from isoloco.gram_kernels import Triple
from isoloco.spectrum import (
    check_is_matrix,
    frobenius_norm,
    inner_product,
    short_by_long,
    stable_rank_of_gram,
    stable_rank_of_matrix,
    unit_scaled,
)
from isoloco.whole_matrix import apply_to_whole

logger = logging.getLogger("isoloco")

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

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

# The classic Newton–Schulz step: converges to 1, slowly.
POLISH: Triple = (1.5, -0.5, 0.0)

# What the input is divided by beside its norm. Polar Express diverges for a singular value above 1, which rounding can
# give; the others are stable there.
SAFETY = {"dion": 1.0, "polar_express": 1.02, "muon": 1.0}

# The Gram form is the faster one from this aspect ratio on (fp32, two CPU cores, 1024 and 2048 rows; the operations
# break even at 1.5), and below this number of rows neither takes long.
GRAM_ASPECT = 1.6
GRAM_MIN_SIZE = 256

# The Gram form works with squares. A singular value x is lost in the rounding of x², and this error grows by the square
# of what x grows by. When the factors a of an iteration have multiplied up to this, the Gram matrix is computed anew:
# never within the sets above, only in longer iterations. That keeps fp32 within 1e-5 of fp64 for ordinary spectra and
# within 2e-3 for the steepest, a hundredth of what Newton–Schulz itself is off there. To compute it anew after two
# steps would gain a digit and cost, at 32000 x 1024, three quarters of the time more.
GRAM_MAX_GROWTH = 1000


def coefficient_triples(coefficients: str, steps: int, polish_steps: int = 0) -> tuple[Triple, ...]:
    """The triples of the first ``steps`` iterations and of the classic ones that follow, for an input of norm 1.

    ``"muon"`` repeats its only triple. Raises ValueError for anything else.
    """
    if coefficients not in COEFFICIENTS:
        raise ValueError(f"coefficients={coefficients!r} is unknown: use one of {', '.join(map(repr, COEFFICIENTS))}")
    triples = COEFFICIENTS[coefficients]
    if steps < 1:
        raise ValueError(f"steps={steps}: Newton–Schulz needs at least one iteration")
    if polish_steps < 0:
        raise ValueError(f"polish_steps={polish_steps}: there cannot be fewer than none")
    if len(triples) == 1:
        triples = triples * steps
    if steps > len(triples):
        raise ValueError(f"steps={steps}: the {coefficients!r} set has only {len(triples)} iterations")
    (a, b, c), safety = triples[0], SAFETY[coefficients]
    first = (a / safety, b / safety**3, c / safety**5)  # p(x / safety)
    return (first, *triples[1:steps], *[POLISH] * polish_steps)


@torch.no_grad()
def newton_schulz(
    matrix: Tensor,
    *,
    coefficients: str = "dion",
    steps: int = 5,
    dtype: torch.dtype | None = None,
    polish_steps: int = 0,
) -> Tensor:
    """Approximate ``U Vᵀ`` of ``matrix = U diag(σ) Vᵀ`` (IsoLoCo 4.3; Muon).

    ``matrix`` has shape (..., m, n): a batch is so many independent matrices. The result has its shape and dtype.
    All singular values become about 1, except those below about 1e-3 of the Frobenius norm, which stay smaller:
    null directions stay null and a zero matrix stays zero. A DTensor is brought whole first.

    ``coefficients``: ``"dion"`` | ``"polar_express"`` | ``"muon"``; ``steps`` uses the first so many triples of the
    set (at most 5; ``"muon"`` repeats its one). ``polish_steps`` classic iterations 1.5 x - 0.5 x³ follow: they bring
    what is between 0 and 1.2 closer to 1, so two or three of them make the result much more like that of an SVD.

    ``dtype`` is that of the iteration; None: fp32 on CPU, bf16 on accelerators (fp16 where the CUDA kernels of
    ``gram-newton-schulz`` are used), fp64 for fp64 input. The norm is taken in fp32 at least, whatever ``dtype``, so
    the result does not depend on the scale of the input. On the CPU a batch gives the bits of its matrices one by one.
    Raises ValueError for bad arguments and for "non-finite" input.
    """
    triples = coefficient_triples(coefficients, steps, polish_steps)
    if dtype not in (None, *DTYPES):
        raise ValueError(f"dtype={dtype!r}: iterate in one of {', '.join(map(str, DTYPES))}, or None for the default")
    if isinstance(matrix, DTensor):
        return apply_to_whole(
            matrix,
            lambda whole: newton_schulz(
                whole, coefficients=coefficients, steps=steps, dtype=dtype, polish_steps=polish_steps
            ),
        )
    check_is_matrix(matrix)
    result = matrix.clone(memory_format=torch.contiguous_format)
    for one in independent(result):
        unit, _ = unit_scaled(one, overwrite=True)
        divide_by_norm(unit)
        one.copy_(orthogonalize(unit, triples, dtype=dtype).matrix)
    return result


def independent(batch: Tensor) -> Sequence[Tensor]:
    """Contiguous (..., m, n) as views (B, m, n) to work on one after the other; none if there is nothing in it.

    On accelerators that is one tensor, for speed. On the CPU it is one for each matrix: batched products, whose
    rounding may depend on the size of the batch, are no faster there, and temporaries stay small.
    """
    if batch.numel() == 0:
        return ()
    flat = batch.view(-1, *batch.shape[-2:])
    return flat.split(1) if batch.device.type == "cpu" else (flat,)


def divide_by_norm(matrix: Tensor) -> Tensor:
    """Make the norm of (B, m, n) matrices 1, in place (zeros stay), and return what it was, (B, 1, 1)."""
    norm = frobenius_norm(matrix)
    matrix.div_(torch.where(norm > 0, norm, 1))
    return norm


# ---- the iteration ----


@dataclass(frozen=True)
class Orthogonalized:
    """What Newton–Schulz makes of unit-norm matrices X (B, m, n), and what it finds out on the way if it is asked."""

    matrix: Tensor
    """O (B, m, n), in the dtype of the iteration or in that of X."""
    inner_product: Tensor | None
    """⟨O, X⟩ (B, 1, 1)."""
    stable_ranks: tuple[Tensor, Tensor] | None
    """Of X and of O, (B,) each."""


def orthogonalize(
    unit: Tensor,
    triples: Sequence[Triple],
    *,
    dtype: torch.dtype | None = None,
    with_inner_product: bool = False,
    with_stable_ranks: bool = False,
) -> Orthogonalized:
    """The polynomials ``triples`` of unit-norm matrices (B, m, n) in fp32 or fp64.

    ``unit`` is scratch: it may be destroyed, and the result may lie in its memory. In its own dtype the work needs one
    more tensor of this size and a few of the size of the Gram matrix.
    """
    device = unit.device.type
    kernels = None
    if dtype is None and unit.dtype != torch.float64 and gram_kernels.can_be_used(unit):
        kernels = gram_kernels.gram_kernels(segments(triples, gram_kernels.MAX_GROWTH))
    if dtype is None:
        dtype = unit.dtype if device == "cpu" or unit.dtype == torch.float64 else torch.bfloat16

    with exact_matmuls(unit.device):
        if kernels is None and uses_gram_form(unit.shape, dtype):
            _log_once(f"Newton–Schulz of long matrices: Gram form in {dtype} on {device}")
            return gram_form(
                unit.to(dtype), triples, with_inner_product=with_inner_product, with_stable_ranks=with_stable_ranks
            )
        before = stable_rank_of_matrix(unit) if with_stable_ranks else None
        if kernels is not None:
            _log_once(f"Newton–Schulz of long matrices: kernels of gram-newton-schulz in torch.float16 on {device}")
            made = kernels(unit.contiguous())
        else:
            _log_once(f"Newton–Schulz: plain form in {dtype} on {device}")
            is_wanted = with_inner_product and dtype == unit.dtype
            made = plain_form(unit.clone() if is_wanted else unit.to(dtype), triples)
        inner = inner_product(made.to(unit.dtype), unit) if with_inner_product else None
        ranks = (before, stable_rank_of_matrix(made.to(unit.dtype))) if before is not None else None
    return Orthogonalized(made, inner, ranks)


def uses_gram_form(shape: Sequence[int], dtype: torch.dtype) -> bool:
    """Whether matrices (..., m, n) are iterated on through their Gram matrix: long ones, where it is faster.

    Never in bf16 or fp16: the squares of the Gram form need more digits than these have.
    """
    r, longer = sorted(shape[-2:])
    return dtype in (torch.float32, torch.float64) and r >= GRAM_MIN_SIZE and longer >= GRAM_ASPECT * r


def plain_form(X: Tensor, triples: Sequence[Triple]) -> Tensor:
    """X ← a X + (b A + c A²) X with A = X Xᵀ for each triple; X (B, m, n) is scratch."""
    source = short_by_long(X)  # the smaller Gram matrix is the cheaper one
    target = torch.empty_like(source)
    for a, b, c in triples:
        A = source @ source.mT  # (B, r, r)
        # Fused, because each product is then rounded to dtype once, after the sum: halves the error of bf16.
        if c != 0:
            A, b = torch.baddbmm(A, A, A, beta=b, alpha=c), 1
        torch.baddbmm(source, A, source, beta=a, alpha=b, out=target)
        source, target = target, source
    return source if source.shape == X.shape else source.mT


def gram_form(
    X: Tensor, triples: Sequence[Triple], *, with_inner_product: bool = False, with_stable_ranks: bool = False
) -> Orthogonalized:
    """X ← Q X for each of the :func:`segments`, where A = X Xᵀ and Q = I become, for each triple, P A P and P Q with
    P = a I + b A + c A².

    X (B, m, n) is scratch. Everything that is asked for comes from the matrices A and Q, which are small.
    """
    source = short_by_long(X)
    target = torch.empty_like(source)
    first_A = product = None  # of the input, and of all Q
    for segment in segments(triples):
        start_A = A = source @ source.mT  # (B, r, r)
        Q = None
        for number, (a, b, c) in enumerate(segment):
            P = torch.baddbmm(A, A, A, beta=b, alpha=c) if c != 0 else b * A
            P.diagonal(dim1=-2, dim2=-1).add_(a)
            Q = P if Q is None else P @ Q
            if number + 1 < len(segment):
                A = P @ A @ P
        assert Q is not None
        torch.matmul(Q, source, out=target)
        source, target = target, source
        first_A = start_A if first_A is None else first_A
        if with_inner_product:
            product = Q if product is None else Q @ product
    made = source if source.shape == X.shape else source.mT

    inner = ranks = None
    assert first_A is not None
    assert Q is not None
    if product is not None:
        inner = (product * first_A).sum(dim=(-2, -1), keepdim=True)  # ⟨Q X, X⟩ = tr(Q A)
    if with_stable_ranks:
        norm = first_A.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None].sqrt()
        before = stable_rank_of_gram(lambda v: first_A @ v, norm, first_A.size(-1))
        after = stable_rank_of_gram(lambda v: Q @ (start_A @ (Q @ v)), frobenius_norm(made), Q.size(-1))
        ranks = (before, after)
    return Orthogonalized(made, inner, ranks)


def segments(triples: Sequence[Triple], max_growth: float = GRAM_MAX_GROWTH) -> tuple[tuple[Triple, ...], ...]:
    """Cut the triples where the Gram matrix has to be computed anew, before growth exceeds ``max_growth``."""
    cut: list[list[Triple]] = []
    growth = math.inf
    for triple in triples:
        growth *= triple[0]
        if growth > max_growth:
            cut.append([])
            growth = triple[0]
        cut[-1].append(triple)
    return tuple(tuple(segment) for segment in cut)


@functools.cache
def _log_once(message: str) -> None:
    logger.info(message)
