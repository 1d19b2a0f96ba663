"""Newton–Schulz: golden values, accuracy, symmetries, edge cases. The ids (I5 …) are those of the invariants list."""

import importlib
import logging
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isoloco import gram_kernels
from isoloco.newton_schulz import (
    coefficient_triples,
    gram_form,
    newton_schulz,
    orthogonalize,
    plain_form,
    segments,
    uses_gram_form,
)

newton_schulz_module = importlib.import_module("isoloco.newton_schulz")  # `isoloco.newton_schulz` is the function

GOLDEN_MATRIX = torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.float64)


def gaussian(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def orthogonal(size: int, seed: int) -> torch.Tensor:
    return torch.linalg.qr(gaussian(size, size, seed=seed, dtype=torch.float64)).Q


def polar_factor(matrix: torch.Tensor) -> torch.Tensor:
    U, _, Vt = torch.linalg.svd(matrix, full_matrices=False)
    return U @ Vt


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a * b).sum() / (a.norm() * b.norm()))


Form = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(params=["plain", "gram"])
def either_form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Matrices of every size are iterated on in this form."""
    monkeypatch.setattr(newton_schulz_module, "GRAM_MIN_SIZE", 1 if request.param == "gram" else math.inf)
    monkeypatch.setattr(newton_schulz_module, "GRAM_ASPECT", 1)
    return request.param


@pytest.mark.usefixtures("either_form")
@pytest.mark.parametrize(
    ("x", "expected"),
    [
        (1.0, 0.978346),
        (0.5, 0.985869),
        (0.1, 1.019050),
        (0.05, 1.010644),
        (0.01, 1.018025),
        (0.005, 1.111505),
        (0.003, 1.075139),
        (0.002, 0.852461),
        (0.001, 0.474982),
        (1e-4, 0.049257),
    ],
)
def test_golden_singular_value_map(x: float, expected: float) -> None:
    """I11: a singular value x = σ/‖M‖_F becomes p(x). fp64, 1e-5 (the printed golden has six decimals)."""
    matrix = torch.diag(torch.tensor([x, (1 - x * x) ** 0.5], dtype=torch.float64))
    assert newton_schulz(matrix)[0, 0].item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.usefixtures("either_form")
def test_golden_slope_at_zero() -> None:
    """I11: directions far below 0.1 % of the norm grow by the product of the first coefficients, 492.7."""
    matrix = torch.diag(torch.tensor([1e-6, 1.0], dtype=torch.float64))
    assert newton_schulz(matrix)[0, 0].item() / 1e-6 == pytest.approx(492.7, abs=0.05)


@pytest.mark.usefixtures("either_form")
def test_golden_matrix() -> None:
    """I12: the 2 × 3 golden matrix, fp64, 1e-5; and its singular values."""
    result = newton_schulz(GOLDEN_MATRIX)
    expected = torch.tensor([[-0.591518, 0.110997, 0.813512], [0.707256, 0.560562, 0.413868]], dtype=torch.float64)
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-6)
    sigma = torch.linalg.svdvals(result)
    torch.testing.assert_close(sigma, torch.tensor([1.015953, 0.988727], dtype=torch.float64), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("shape", "max_error", "min_cosine"),
    [((2688, 1024), 0.03, 0.999), ((1024, 1024), 0.16, 0.985)],
)
def test_accuracy_on_gaussian_matrices(shape: tuple[int, int], max_error: float, min_cosine: float) -> None:
    """I13: distance to UVᵀ on the shapes of the 178M model."""
    matrix = gaussian(*shape)
    # UVᵀ through the Gram matrix in fp64: as good as an SVD for these condition numbers and several times faster
    exact = matrix.double()
    eigenvalues, Q = torch.linalg.eigh(exact.T @ exact)
    exact = exact @ (Q * eigenvalues.rsqrt()) @ Q.T
    result = newton_schulz(matrix).double()
    assert relative_error(result, exact) < max_error
    assert cosine(result, exact) > min_cosine


def test_bf16_iteration_costs_at_most_one_percent() -> None:
    """I13: on a well-conditioned matrix the bf16 iteration is as close to UVᵀ as fp32 to within 0.01."""
    matrix = gaussian(256, 64)
    exact = polar_factor(matrix)
    in_fp32 = relative_error(newton_schulz(matrix, dtype=torch.float32), exact)
    in_bf16 = relative_error(newton_schulz(matrix, dtype=torch.bfloat16), exact)
    assert in_bf16 != in_fp32
    assert in_bf16 < in_fp32 + 0.01


@pytest.mark.parametrize(
    ("coefficients", "low", "high"),
    [("dion", 0.978, 1.032), ("muon", 0.682, 1.134), ("polar_express", 0.859, 1.141)],
)
def test_output_range_of_each_coefficient_set(coefficients: str, low: float, high: float) -> None:
    """Singular values above 1 % of the norm land in the documented range of the set, and reach both of its ends."""
    x = torch.logspace(-2, 0, 400, dtype=torch.float64)
    # 2 × 2 matrices with one singular value at x and the other filling up the norm
    outputs = newton_schulz(
        torch.diag_embed(torch.stack([x, (1 - x * x).clamp(min=0).sqrt()], -1)), coefficients=coefficients
    )
    outputs = outputs[:, 0, 0]
    assert low - 1e-3 < outputs.min() < low + 2e-2
    assert high - 2e-2 < outputs.max() < high + 1e-3


def test_first_steps_of_a_set_are_used() -> None:
    """One step applies the first triple alone; the Muon set repeats its only triple for as long as asked."""
    x = 0.3
    matrix = torch.diag(torch.tensor([x, (1 - x * x) ** 0.5], dtype=torch.float64))
    assert newton_schulz(matrix, steps=1)[0, 0].item() == pytest.approx(4.0848 * x - 6.8946 * x**3 + 2.9270 * x**5)
    y = x
    for _ in range(7):
        y = 3.4445 * y - 4.7750 * y**3 + 2.0315 * y**5
    assert newton_schulz(matrix, coefficients="muon", steps=7)[0, 0].item() == pytest.approx(y, abs=1e-12)


@pytest.mark.usefixtures("either_form")
@pytest.mark.parametrize("shape", [(4, 24, 40), (2, 3, 40, 24), (5, 16, 16), (3, 200, 300)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_batch_is_a_loop_bit_for_bit(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """I14: on the CPU a batch gives what its matrices give one by one, each with a norm of its own.

    So it does not matter which matrices an owner happens to get together.
    """
    batch = gaussian(*shape) * 10.0 ** torch.arange(shape[0]).view(-1, *[1] * (len(shape) - 1))
    one_by_one = torch.stack([newton_schulz(matrix, dtype=dtype) for matrix in batch.flatten(0, -3)]).view(shape)
    assert torch.equal(newton_schulz(batch, dtype=dtype), one_by_one)


SPECTRA = {
    "k^-1/2": torch.arange(1, 97) ** -0.5,
    "k^-1": torch.arange(1, 97) ** -1.0,
    "k^-4": torch.arange(1, 97) ** -4.0,
    "a quarter of the rank": (torch.arange(1, 97) <= 24).double(),
    "one spike": torch.cat([torch.tensor([100.0]), torch.ones(95)]),
}


@pytest.mark.parametrize("spectrum", ["Gaussian", *SPECTRA])
@pytest.mark.parametrize("coefficients", ["dion", "polar_express", "muon"])
@pytest.mark.parametrize("polish_steps", [0, 3])
@pytest.mark.parametrize("shape", [(96, 250), (250, 96)])
def test_the_forms_meet_one_tolerance_table(
    shape: tuple[int, int], polish_steps: int, coefficients: str, spectrum: str
) -> None:
    """I14: fp64 agree to 1e-10; fp32 is as good as fp64 to 1e-4, to 4e-3 for spectra that fall like 1/k or faster."""
    matrix = gaussian(*shape, dtype=torch.float64)
    if spectrum in SPECTRA:
        U, _, Vt = torch.linalg.svd(matrix, full_matrices=False)
        matrix = (U * SPECTRA[spectrum]) @ Vt
    unit = (matrix / matrix.norm())[None]
    triples = coefficient_triples(coefficients, 5, polish_steps)
    exact = plain_form(unit.clone(), triples)
    assert relative_error(gram_form(unit.clone(), triples).matrix, exact) < 1e-10
    tolerance = 4e-3 if spectrum in ("k^-1", "k^-4") else 1e-4
    assert relative_error(plain_form(unit.float(), triples), exact) < tolerance
    assert relative_error(gram_form(unit.float(), triples).matrix, exact) < tolerance


@pytest.mark.usefixtures("either_form")
@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 12), cols=st.integers(1, 12), seed=st.integers(0, 10_000), rank=st.integers(1, 12))
def test_singular_values_are_mapped_one_by_one(rows: int, cols: int, seed: int, rank: int) -> None:
    """Any shape and rank: the result has the singular vectors of the input and p of its singular values, in fp64."""
    matrix = gaussian(rows, rank, seed=seed, dtype=torch.float64) @ gaussian(rank, cols, seed=seed + 1).double()
    U, sigma, Vt = torch.linalg.svd(matrix, full_matrices=False)
    x = sigma / sigma.square().sum().sqrt()
    for a, b, c in coefficient_triples("dion", 5):
        x = a * x + b * x**3 + c * x**5
    torch.testing.assert_close(newton_schulz(matrix), (U * x) @ Vt, rtol=0, atol=1e-9)


def test_a_long_iteration_through_the_gram_matrix_computes_it_anew() -> None:
    """Rounding errors grow with every step: after growth of 1000 the iteration starts from the matrix again."""
    assert [len(part) for part in segments(coefficient_triples("dion", 5))] == [5]
    assert [len(part) for part in segments(coefficient_triples("polar_express", 5))] == [5]
    assert [len(part) for part in segments(coefficient_triples("muon", 12))] == [5, 5, 2]
    unit = gaussian(64, 16, dtype=torch.float64) @ gaussian(16, 200, seed=1, dtype=torch.float64)
    unit = (unit / unit.norm())[None]
    triples = coefficient_triples("muon", 12)
    null_part = torch.linalg.svdvals(gram_form(unit.float(), triples).matrix)[0, 16:]
    assert torch.isfinite(null_part).all()
    assert null_part.max() < 0.06


@pytest.mark.parametrize(
    ("shape", "dtype", "expected"),
    [
        ((1024, 1024), torch.float32, False),
        ((1024, 2688), torch.float32, True),
        ((2688, 1024), torch.float32, True),
        ((5440, 1536), torch.float64, True),
        ((7, 32000, 2048), torch.float32, True),
        ((1024, 1500), torch.float32, False),
        ((64, 96000), torch.float32, False),
        ((32000, 1024), torch.bfloat16, False),
        ((32000, 1024), torch.float16, False),
    ],
)
def test_the_form_is_chosen_by_shape_and_dtype(shape: tuple[int, ...], dtype: torch.dtype, expected: bool) -> None:
    """Through the Gram matrix where it is faster, and only with digits enough for squares."""
    assert uses_gram_form(shape, dtype) == expected


@pytest.mark.parametrize("shape", [(300, 700), (700, 300), (256, 300)])
def test_what_is_found_out_on_the_way(shape: tuple[int, int]) -> None:
    """⟨O, X⟩ and the stable ranks of X and O, whichever form it takes."""
    unit = gaussian(2, *shape)
    unit /= unit.norm(dim=(1, 2), keepdim=True)
    made = orthogonalize(unit.clone(), coefficient_triples("dion", 5), with_inner_product=True, with_stable_ranks=True)
    assert made.inner_product is not None
    torch.testing.assert_close(made.inner_product, (made.matrix * unit).sum((1, 2), keepdim=True), rtol=1e-4, atol=0)
    assert made.stable_ranks is not None
    for matrix, found in zip((unit, made.matrix), made.stable_ranks, strict=True):
        sigma = torch.linalg.svdvals(matrix)
        torch.testing.assert_close(found, sigma.square().sum(-1) / sigma[:, 0] ** 2, rtol=0.06, atol=0)


def test_polish_steps_are_the_classic_iteration() -> None:
    """Each maps x to 1.5 x - 0.5 x³ after the set's own steps."""
    matrix = torch.diag(torch.tensor([0.002, (1 - 0.002**2) ** 0.5], dtype=torch.float64))
    x = newton_schulz(matrix)[0, 0].item()
    assert newton_schulz(matrix, polish_steps=1)[0, 0].item() == pytest.approx(1.5 * x - 0.5 * x**3, abs=1e-12)


@pytest.mark.parametrize(
    ("spectrum", "errors"),
    [("k^-1", (0.374, 0.241, 0.119, 0.037)), ("Gaussian", (0.124, 0.099, 0.082, 0.068))],
)
def test_polish_steps_bring_the_result_closer_to_that_of_an_svd(spectrum: str, errors: Sequence[float]) -> None:
    """I.2: distance to UVᵀ after 0, 1, 2, 3 of them, for 1024 x 1024; a diagonal matrix stands for its spectrum."""
    sigma = 1 / torch.arange(1, 1025) if spectrum == "k^-1" else torch.linalg.svdvals(gaussian(1024, 1024))
    for polish_steps, error in enumerate(errors):
        x = (sigma / sigma.norm()).double()
        for a, b, c in coefficient_triples("dion", 5, polish_steps):
            x = a * x + b * x**3 + c * x**5
        assert (x - 1).square().mean().sqrt().item() == pytest.approx(error, abs=0.004)


@pytest.mark.usefixtures("either_form")
@pytest.mark.parametrize("factor", [2.0**-20, 2.0**10, -1.0, -(2.0**60)])
def test_scale_free_and_odd(factor: float) -> None:
    """I5: NS(cM) = sign(c) · NS(M), bit for bit when c is a power of two: the norm is relative and taken in fp32."""
    matrix = gaussian(24, 40)
    expected = newton_schulz(matrix) * (1 if factor > 0 else -1)
    assert torch.equal(newton_schulz(matrix * factor), expected)


@pytest.mark.usefixtures("either_form")
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-5), (torch.bfloat16, 2e-2)]
)
@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (32, 32)])
def test_transpose(shape: tuple[int, int], dtype: torch.dtype, tolerance: float) -> None:
    """I6: NS(Mᵀ) = NS(M)ᵀ."""
    matrix = gaussian(*shape, dtype=torch.float64)
    assert relative_error(newton_schulz(matrix.T, dtype=dtype), newton_schulz(matrix, dtype=dtype).T) < tolerance


@pytest.mark.usefixtures("either_form")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.bfloat16, 3e-2)])
def test_rotations_commute(dtype: torch.dtype, tolerance: float) -> None:
    """I7: NS(QMP) = Q · NS(M) · P for orthogonal Q and P."""
    matrix, Q, P = gaussian(24, 40, dtype=torch.float64), orthogonal(24, seed=1), orthogonal(40, seed=2)
    assert (
        relative_error(newton_schulz(Q @ matrix @ P, dtype=dtype), Q @ newton_schulz(matrix, dtype=dtype) @ P)
        < tolerance
    )


@pytest.mark.usefixtures("either_form")
@pytest.mark.parametrize("scale", [1e-44, 1e-30, 1e-20, 1e20, 1e37])
def test_tiny_and_huge_matrices_are_ordinary(scale: float) -> None:
    """Squares of 1e-20 vanish and those of 1e20 overflow in fp32; neither may reach the result."""
    matrix = gaussian(24, 40) * scale
    assert relative_error(newton_schulz(matrix), newton_schulz(matrix.double() / scale)) < 1e-5


@pytest.mark.usefixtures("either_form")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_zero_matrix_stays_zero(dtype: torch.dtype) -> None:
    """I18: exact zeros, no NaN; also as one matrix of a batch, where the others are not affected."""
    assert torch.equal(newton_schulz(torch.zeros(8, 5, dtype=dtype)), torch.zeros(8, 5, dtype=dtype))
    batch = torch.stack([torch.zeros(8, 5), gaussian(8, 5)])
    result = newton_schulz(batch)
    assert torch.equal(result[0], torch.zeros(8, 5))
    assert relative_error(result[1], newton_schulz(batch[1])) < 1e-6


@pytest.mark.usefixtures("either_form")
def test_null_directions_stay_null() -> None:
    """B.7: of a matrix of rank 16 the other directions are not lifted; the list allows 0.06, fp32 keeps below 0.001."""
    matrix = gaussian(64, 16) @ gaussian(16, 64, seed=1)
    sigma = torch.linalg.svdvals(newton_schulz(matrix))
    assert sigma[15] > 0.9
    assert sigma[16] < 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_result_has_shape_and_dtype_of_the_input(dtype: torch.dtype) -> None:
    matrix = gaussian(7, 3, dtype=dtype)
    before = matrix.clone()
    result = newton_schulz(matrix)
    assert (result.shape, result.dtype) == (matrix.shape, dtype)
    assert torch.equal(matrix, before), "the input must not be changed"
    assert newton_schulz(torch.zeros(0, 4, dtype=dtype)).shape == (0, 4)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_input_is_named(bad: float) -> None:
    """I18: one NaN would poison the whole matrix silently."""
    matrix = gaussian(6, 4)
    matrix[2, 3] = bad
    with pytest.raises(ValueError, match="non-finite"):
        newton_schulz(matrix)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"coefficients": "dio"}, "'dion'"),
        ({"steps": 0}, "at least one"),
        ({"steps": 6}, "only 5"),
        ({"coefficients": "polar_express", "steps": 6}, "only 5"),
        ({"polish_steps": -1}, "polish_steps=-1"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        newton_schulz(gaussian(4, 4), **arguments)


@pytest.mark.parametrize("matrix", [torch.ones(3), torch.ones(2, 2, dtype=torch.int64)])
def test_what_is_not_a_matrix_is_refused(matrix: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="floating-point matrix"):
        newton_schulz(matrix)


def test_autocast_does_not_reach_the_iteration() -> None:
    """Inside an autocast region the products would silently be bf16."""
    matrix = gaussian(24, 40)
    expected = newton_schulz(matrix)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(newton_schulz(matrix), expected)


def test_reduced_matmul_precision_is_off_inside_and_back_after(monkeypatch: pytest.MonkeyPatch) -> None:
    """TF32 (or bf16 on CPU) that the trainer allows for its model is not used for the outer step."""
    seen = []
    product = torch.Tensor.__matmul__

    def recording(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        seen.append(torch.backends.cuda.matmul.fp32_precision)
        return product(a, b)

    monkeypatch.setattr(torch.Tensor, "__matmul__", recording)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        newton_schulz(gaussian(4, 6))
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)
    assert seen == ["ieee"] * 5


def test_the_path_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    newton_schulz_module._log_once.cache_clear()
    with caplog.at_level(logging.INFO, "isoloco"):
        for _ in range(2):
            newton_schulz(gaussian(8, 8))
            newton_schulz(gaussian(256, 512))
    assert [record.message for record in caplog.records] == [
        "Newton–Schulz: plain form in torch.float32 on cpu",
        "Newton–Schulz of long matrices: Gram form in torch.float32 on cpu",
    ]


# ---- the optional CUDA kernels ----


@pytest.mark.parametrize(
    ("shape", "device", "capability", "installed", "expected"),
    [
        ((4, 2688, 1024), "cuda", (9, 0), True, True),
        ((4, 1024, 2688), "cuda", (10, 0), True, True),
        ((4, 1024, 1024), "cuda", (9, 0), True, False),
        ((4, 256, 1024), "cuda", (9, 0), True, False),
        ((4, 2688, 1024), "cuda", (8, 0), True, False),
        ((4, 2688, 1024), "cuda", (12, 0), True, False),
        ((4, 2688, 1024), "cuda", (9, 0), False, False),
        ((4, 2688, 1024), "cpu", (9, 0), True, False),
    ],
)
def test_kernels_are_used_where_they_fit_and_are_faster(
    shape: tuple[int, ...],
    device: str,
    capability: tuple[int, int],
    installed: bool,
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On Hopper and Blackwell, for matrices that are not square and larger than their tiles, if installed."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if installed else None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    matrix = SimpleNamespace(shape=torch.Size(shape), device=torch.device(device))
    assert gram_kernels.can_be_used(matrix) == expected  # type: ignore[arg-type]


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Stands for the package: the same interface, the iteration in torch. Used for all matrices that are not square."""
    calls = SimpleNamespace(options=[], shapes=[])

    def make(**options: object) -> Callable[[torch.Tensor], torch.Tensor]:
        calls.options.append(options)

        def iteration(X: torch.Tensor) -> torch.Tensor:
            calls.shapes.append(tuple(X.shape))
            X = X / (X.norm(dim=(-2, -1), keepdim=True) + 1e-7)
            return plain_form(X.clone(), options["ns_coefficients"])  # type: ignore[arg-type]

        return iteration

    monkeypatch.setitem(sys.modules, "gram_newton_schulz", SimpleNamespace(GramNewtonSchulz=make))
    monkeypatch.setattr(gram_kernels, "can_be_used", lambda matrix: matrix.size(-1) != matrix.size(-2))
    gram_kernels.gram_kernels.cache_clear()
    yield calls
    gram_kernels.gram_kernels.cache_clear()


def test_kernels_get_our_coefficients(package: SimpleNamespace) -> None:
    """The same numbers whichever path runs, safety factor included; and the iteration is made once."""
    batch = gaussian(3, 24, 40) * 1e-20
    batch[1] = 0
    results = {}
    for coefficients in ("dion", "polar_express"):
        results[coefficients] = newton_schulz(batch, coefficients=coefficients)
        newton_schulz(batch, coefficients=coefficients)
    assert set(package.shapes) == {(1, 24, 40)}
    assert len(package.options) == 2
    for coefficients, options in zip(results, package.options, strict=True):
        expected = newton_schulz(batch.double(), coefficients=coefficients)
        torch.testing.assert_close(results[coefficients].double(), expected, rtol=0, atol=1e-5)
        assert options["ns_use_kernels"] is True
        assert options["gram_newton_schulz_reset_iterations"] == [2]
    assert package.options[0]["ns_coefficients"] == [list(triple) for triple in coefficient_triples("dion", 5)]


@pytest.mark.usefixtures("package")
def test_kernels_report_what_the_other_forms_report() -> None:
    unit = gaussian(1, 24, 40)
    unit /= unit.norm()
    made = orthogonalize(unit.clone(), coefficient_triples("dion", 5), with_inner_product=True, with_stable_ranks=True)
    assert made.inner_product is not None
    assert made.inner_product.item() == pytest.approx((made.matrix * unit).sum().item(), rel=1e-5)
    assert made.stable_ranks is not None
    assert made.stable_ranks[1].item() == pytest.approx(24, rel=0.1)


def test_a_dtype_that_is_asked_for_is_used(package: SimpleNamespace) -> None:
    """The kernels iterate in fp16: only for those who left the choice."""
    newton_schulz(gaussian(24, 40), dtype=torch.bfloat16)
    newton_schulz(gaussian(24, 40, dtype=torch.float64))
    assert package.shapes == []


def test_kernels_that_do_not_load_are_done_without(
    package: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    matrix = gaussian(24, 40)
    monkeypatch.setitem(sys.modules, "gram_newton_schulz", SimpleNamespace())
    assert relative_error(newton_schulz(matrix), newton_schulz(matrix.double())) < 1e-5
    newton_schulz(matrix)
    assert [record.levelname for record in caplog.records].count("WARNING") == 1
    assert package.shapes == []


@pytest.mark.parametrize("coefficients", ["dion", "polar_express", "muon"])
@pytest.mark.parametrize("shape", [(2, 64, 160), (160, 64), (64, 64)])
def test_the_package_itself_meets_the_tolerance_of_half_precision(shape: tuple[int, ...], coefficients: str) -> None:
    """Its code in torch, where it is installed: as far from fp64 as our bf16 iteration may be."""
    pytest.importorskip("gram_newton_schulz")
    matrix = gaussian(*shape)
    parts = segments(coefficient_triples(coefficients, 5), gram_kernels.MAX_GROWTH)
    iteration = gram_kernels.gram_kernels(parts, use_kernels=False)
    assert iteration is not None
    expected = newton_schulz(matrix.double(), coefficients=coefficients)
    assert relative_error(iteration(matrix / matrix.norm(dim=(-2, -1), keepdim=True)), expected) < 1e-2


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64])
def test_a_dtype_without_arithmetic_for_it_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match="dtype="):
        newton_schulz(torch.eye(3), dtype=dtype)
