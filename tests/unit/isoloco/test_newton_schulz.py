"""Newton–Schulz: golden values, accuracy, symmetries, edge cases. The ids (I5 …) are those of the invariants list."""

import pytest
import torch

from isoloco.newton_schulz import newton_schulz

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


def test_golden_slope_at_zero() -> None:
    """I11: directions far below 0.1 % of the norm grow by the product of the first coefficients, 492.7."""
    matrix = torch.diag(torch.tensor([1e-9, 1.0], dtype=torch.float64))
    assert newton_schulz(matrix)[0, 0].item() / 1e-9 == pytest.approx(492.7, abs=0.05)


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


@pytest.mark.parametrize("shape", [(4, 24, 40), (2, 3, 40, 24), (5, 16, 16)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_batch_is_a_loop(shape: tuple[int, ...], dtype: torch.dtype, tolerance: float) -> None:
    """I14: a batch gives what its matrices give one by one, each with a norm of its own."""
    batch = gaussian(*shape) * 10.0 ** torch.arange(shape[0]).view(-1, *[1] * (len(shape) - 1))
    one_by_one = torch.stack([newton_schulz(matrix, dtype=dtype) for matrix in batch.flatten(0, -3)]).view(shape)
    assert relative_error(newton_schulz(batch, dtype=dtype), one_by_one) < tolerance


@pytest.mark.parametrize("factor", [2.0**-20, 2.0**10, -1.0, -(2.0**60)])
def test_scale_free_and_odd(factor: float) -> None:
    """I5: NS(cM) = sign(c) · NS(M), bit for bit when c is a power of two: the norm is relative and taken in fp32."""
    matrix = gaussian(24, 40)
    expected = newton_schulz(matrix) * (1 if factor > 0 else -1)
    assert torch.equal(newton_schulz(matrix * factor), expected)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)]
)
@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (32, 32)])
def test_transpose(shape: tuple[int, int], dtype: torch.dtype, tolerance: float) -> None:
    """I6: NS(Mᵀ) = NS(M)ᵀ."""
    matrix = gaussian(*shape, dtype=torch.float64)
    assert relative_error(newton_schulz(matrix.T, dtype=dtype), newton_schulz(matrix, dtype=dtype).T) < tolerance


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.bfloat16, 3e-2)])
def test_rotations_commute(dtype: torch.dtype, tolerance: float) -> None:
    """I7: NS(QMP) = Q · NS(M) · P for orthogonal Q and P."""
    matrix, Q, P = gaussian(24, 40, dtype=torch.float64), orthogonal(24, seed=1), orthogonal(40, seed=2)
    assert (
        relative_error(newton_schulz(Q @ matrix @ P, dtype=dtype), Q @ newton_schulz(matrix, dtype=dtype) @ P)
        < tolerance
    )


@pytest.mark.parametrize("scale", [1e-44, 1e-30, 1e-20, 1e20, 1e37])
def test_tiny_and_huge_matrices_are_ordinary(scale: float) -> None:
    """Squares of 1e-20 vanish and those of 1e20 overflow in fp32; neither may reach the result."""
    matrix = gaussian(24, 40) * scale
    assert relative_error(newton_schulz(matrix), newton_schulz(matrix.double() / scale)) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_zero_matrix_stays_zero(dtype: torch.dtype) -> None:
    """I18: exact zeros, no NaN; also as one matrix of a batch, where the others are not affected."""
    assert torch.equal(newton_schulz(torch.zeros(8, 5, dtype=dtype)), torch.zeros(8, 5, dtype=dtype))
    batch = torch.stack([torch.zeros(8, 5), gaussian(8, 5)])
    result = newton_schulz(batch)
    assert torch.equal(result[0], torch.zeros(8, 5))
    assert relative_error(result[1], newton_schulz(batch[1])) < 1e-6


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
