"""Isotropic matrices: golden values, algebra and edge cases. The ids (I1 …) are those of the invariants list."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isoloco.isotropic import isotropic, make_isotropic
from isoloco.newton_schulz import newton_schulz

GOLDEN_MATRIX = torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.float64)
SHAPES = [(5, 3), (3, 5), (8, 8), (64, 96), (96, 64)]
FAST = {"orthogonalizer": "newton_schulz", "scale": "rms"}


def gaussian(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def orthogonal(size: int, seed: int) -> torch.Tensor:
    return torch.linalg.qr(gaussian(size, size, seed=seed, dtype=torch.float64)).Q


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-4), (torch.float64, 1e-10)])
@pytest.mark.parametrize("shape", SHAPES)
def test_all_singular_values_equal_the_mean(shape: tuple[int, int], dtype: torch.dtype, rtol: float) -> None:
    """I1: the definition."""
    matrix = gaussian(*shape, dtype=dtype)
    mean = torch.linalg.svdvals(matrix.double()).mean()
    sigma = torch.linalg.svdvals(isotropic(matrix).double())
    torch.testing.assert_close(sigma, mean.expand_as(sigma), rtol=rtol, atol=0)


def test_golden_matrix() -> None:
    """I2: the printed six decimals of Iso, its RMS variant, clip_high and clip_low on [[1, 2, 3], [4, 5, 6]]."""

    def check(actual: torch.Tensor, rows: list[list[float]]) -> None:
        torch.testing.assert_close(actual, torch.tensor(rows, dtype=torch.float64), rtol=0, atol=1e-6)

    check(isotropic(GOLDEN_MATRIX), [[-2.970110, 0.591752, 4.153614], [3.632993, 2.908248, 2.183503]])
    check(isotropic(GOLDEN_MATRIX, clip="high"), [[0.276721, 1.044485, 1.812249], [2.273111, 2.718628, 3.164145]])
    check(isotropic(GOLDEN_MATRIX, clip="low"), [[-2.246832, 1.547267, 5.341365], [5.359882, 5.189620, 5.019358]])
    sigma = torch.linalg.svdvals(isotropic(GOLDEN_MATRIX))
    check(sigma, [5.140451, 5.140451])
    check(torch.linalg.svdvals(isotropic(GOLDEN_MATRIX, scale="rms")), [6.745369, 6.745369])
    check(isotropic(GOLDEN_MATRIX, **FAST), (6.745369 * newton_schulz(GOLDEN_MATRIX)).tolist())


@pytest.mark.parametrize("shape", SHAPES)
def test_nuclear_norm_is_kept_and_the_frobenius_norm_does_not_grow(shape: tuple[int, int]) -> None:
    """I3: ‖Iso(M)‖_* = ‖M‖_*; ‖Iso(M)‖_F ≤ ‖M‖_F; ⟨M, Iso(M)⟩ = σ̄ Σσ = r σ̄². 1e-5."""
    matrix = gaussian(*shape)
    result = isotropic(matrix)
    nuclear, r = torch.linalg.matrix_norm(matrix, "nuc").item(), min(shape)
    assert torch.linalg.matrix_norm(result, "nuc").item() == pytest.approx(nuclear, rel=1e-5)
    assert result.norm() <= matrix.norm()
    assert (matrix * result).sum().item() == pytest.approx(nuclear**2 / r, rel=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_idempotent(shape: tuple[int, int]) -> None:
    """I4: Iso(Iso(M)) = Iso(M). 1e-4 allowed."""
    once = isotropic(gaussian(*shape))
    assert relative_error(isotropic(once), once) < 1e-5


@pytest.mark.parametrize("factor", [1e-6, 1e3, -1.0, -1e3])
def test_odd_and_homogeneous(factor: float) -> None:
    """I5: Iso(cM) = c · Iso(M). 1e-5 with the SVD."""
    matrix = gaussian(24, 40)
    assert relative_error(isotropic(matrix * factor), isotropic(matrix) * factor) < 1e-5
    assert relative_error(isotropic(matrix, clip="high") * factor, isotropic(matrix * factor, clip="high")) < 1e-5


@pytest.mark.parametrize("factor", [2.0**-20, 2.0**10, -1.0])
@pytest.mark.parametrize("options", [FAST, FAST | {"scale": "nuclear"}])
def test_fast_version_is_homogeneous_bit_for_bit_in_powers_of_two(factor: float, options: dict) -> None:
    """I5: norms are relative and in fp32, so not even rounding depends on the size of the input."""
    matrix = gaussian(24, 40)
    assert torch.equal(isotropic(matrix * factor, **options), isotropic(matrix, **options) * factor)


@pytest.mark.parametrize("shape", SHAPES)
def test_transpose(shape: tuple[int, int]) -> None:
    """I6: Iso(Mᵀ) = Iso(M)ᵀ. 1e-5 in fp32 for both versions, 1e-12 in fp64."""
    matrix = gaussian(*shape)
    assert relative_error(isotropic(matrix.T), isotropic(matrix).T) < 1e-5
    assert relative_error(isotropic(matrix.T, **FAST), isotropic(matrix, **FAST).T) < 1e-5
    matrix = matrix.double()
    assert relative_error(isotropic(matrix.T, **FAST), isotropic(matrix, **FAST).T) < 1e-12


def test_rotations_commute() -> None:
    """I7: Iso(QMP) = Q · Iso(M) · P for orthogonal Q and P. 1e-5."""
    matrix, Q, P = gaussian(24, 40), orthogonal(24, seed=1).float(), orthogonal(40, seed=2).float()
    assert relative_error(isotropic(Q @ matrix @ P), Q @ isotropic(matrix) @ P) < 1e-5


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 12), cols=st.integers(1, 12), seed=st.integers(0, 10_000), rank=st.integers(1, 12))
def test_the_two_clips_add_up(rows: int, cols: int, seed: int, rank: int) -> None:
    """I8: clip_high(M) + clip_low(M) = M + Iso(M), as min + max = σ + σ̄; of any shape and rank. 1e-5, here in fp64."""
    matrix = gaussian(rows, rank, seed=seed, dtype=torch.float64) @ gaussian(rank, cols, seed=seed + 1).double()
    both = isotropic(matrix, clip="high") + isotropic(matrix, clip="low")
    assert relative_error(both, matrix + isotropic(matrix)) < 1e-5


def test_scaled_orthogonal_matrix_is_unchanged() -> None:
    """I9: Iso(M) = M to 1e-5, NS with RMS to within 2e-2 (p(1/√r) = 1.016 for r = 64)."""
    matrix = 3.7 * orthogonal(64, seed=3)[:, :40].float()
    assert relative_error(isotropic(matrix), matrix) < 1e-5
    assert relative_error(isotropic(matrix, **FAST), matrix) < 2e-2


@pytest.mark.parametrize("shape", SHAPES)
def test_rms_is_at_least_the_mean(shape: tuple[int, int]) -> None:
    """I10: equality exactly for flat spectra; and RMS keeps the Frobenius norm."""
    matrix = gaussian(*shape)
    mean, rms = isotropic(matrix).norm(), isotropic(matrix, scale="rms").norm()
    assert rms > mean * 1.001
    assert rms.item() == pytest.approx(matrix.norm().item(), rel=1e-5)
    flat = isotropic(matrix)
    assert isotropic(flat, scale="rms").norm().item() == pytest.approx(isotropic(flat).norm().item(), rel=1e-5)


def test_fast_version_keeps_the_norm_of_well_conditioned_matrices_only() -> None:
    """I10: ‖s · NS(M)‖_F ≈ ‖M‖_F within 4 % when all σ exceed 1 % of the norm; 22 % low for σ_k = 1/k, r = 1024."""
    matrix = gaussian(256, 64)
    assert isotropic(matrix, **FAST).norm().item() == pytest.approx(matrix.norm().item(), rel=0.04)
    steep = torch.diag(1 / torch.arange(1, 1025))
    assert (isotropic(steep, **FAST).norm() / steep.norm()).item() == pytest.approx(0.775, abs=0.01)


@pytest.mark.parametrize("options", [{}, {"scale": "rms"}, {"scale": "nuclear"}, {"clip": "low"}, FAST])
def test_zeros_give_zeros(options: dict) -> None:
    """I18: exact zeros and no NaN."""
    assert torch.equal(isotropic(torch.zeros(6, 4), **options), torch.zeros(6, 4))


def test_rank_one() -> None:
    """I18: σ̄ = σ_1/r counts the zeros; null directions become zero, so the output is σ̄ · u vᵀ. 1e-5."""
    u, v = gaussian(20, seed=1), gaussian(12, seed=2)
    matrix = torch.outer(u, v)
    assert relative_error(isotropic(matrix), matrix / 12) < 1e-5
    assert relative_error(isotropic(matrix, scale="nuclear"), matrix / 12) < 1e-5


@pytest.mark.parametrize("clip", [None, "high", "low"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_null_directions_become_zero(clip: str | None, dtype: torch.dtype) -> None:
    """B.7: a matrix of rank 5 gives one of rank 5, whatever vectors LAPACK returns for the null space."""
    matrix = gaussian(40, 5, dtype=dtype) @ gaussian(5, 30, seed=1, dtype=dtype)
    sigma = torch.linalg.svdvals(isotropic(matrix, clip=clip))
    assert sigma[4] > 0.1 * sigma[0]
    assert sigma[5] < 1e-5 * sigma[0]
    if clip is None:
        mean = torch.linalg.svdvals(matrix).mean().item()
        assert sigma[:5].tolist() == pytest.approx([mean] * 5, rel=1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("shape", [(6, 4), (1, 4)])
@pytest.mark.parametrize("options", [{}, FAST])
def test_non_finite_input_is_named(bad: float, shape: tuple[int, int], options: dict) -> None:
    """I18: also in a single row, which is otherwise passed through."""
    matrix = gaussian(*shape)
    matrix[0, 3] = bad
    with pytest.raises(ValueError, match="non-finite"):
        isotropic(matrix, **options)


@pytest.mark.parametrize("shape", [(1, 7), (7, 1), (1, 1), (3, 1, 7)])
@pytest.mark.parametrize("options", [{}, FAST, {"clip": "high"}, {"scale": "spectral"}])
def test_single_row_or_column_is_unchanged(shape: tuple[int, ...], options: dict) -> None:
    """I21: one singular value is its own mean; exact, and not the same memory."""
    matrix = gaussian(*shape)
    result = isotropic(matrix, **options)
    assert torch.equal(result, matrix)
    assert result.data_ptr() != matrix.data_ptr()


@pytest.mark.parametrize(("power", "tolerance"), [(None, 0.01), (0.5, 0.01), (1.0, 0.05)])
def test_nuclear_scale_approximates_the_mean(power: float | None, tolerance: float) -> None:
    """I22: ⟨NS(M), M⟩/r is within 1 % of the mean singular value for Gaussian and k^-½ spectra, 5 % for k^-1."""
    # NS acts on singular values alone, so a diagonal matrix stands for every matrix with its spectrum
    k = torch.arange(1, 1025, dtype=torch.float32)
    matrix = gaussian(1024, 1024) if power is None else torch.diag(k**-power)
    mean = torch.linalg.svdvals(matrix).mean() if power is None else (k**-power).mean()
    directions = newton_schulz(matrix)
    length = (directions * matrix).sum() / 1024
    assert length.item() == pytest.approx(mean.item(), rel=tolerance)
    expected = directions * length
    assert relative_error(isotropic(matrix, orthogonalizer="newton_schulz", scale="nuclear"), expected) < 1e-5


def test_mean_scale_with_newton_schulz_is_the_true_mean() -> None:
    matrix = gaussian(24, 40)
    result = isotropic(matrix, orthogonalizer="newton_schulz", scale="mean")
    expected = newton_schulz(matrix) * torch.linalg.svdvals(matrix).mean()
    assert relative_error(result, expected) < 1e-5


def test_clips_agree_on_flat_spectra_and_are_ordered() -> None:
    """I23: none, clip_high, clip_low and Iso agree on a flat spectrum; else ‖high‖ ≤ ‖M‖ ≤ ‖low‖."""
    flat = 0.3 * orthogonal(24, seed=1).float()
    for clip in (None, "high", "low"):
        assert relative_error(isotropic(flat, clip=clip), flat) < 1e-5
    matrix = gaussian(24, 24)
    high, low = isotropic(matrix, clip="high"), isotropic(matrix, clip="low")
    assert high.norm() < matrix.norm() < low.norm()


@pytest.mark.parametrize("orthogonalizer", ["svd", "newton_schulz"])
@pytest.mark.parametrize("shape", [(96, 64), (64, 96)])
def test_spectral_scale_is_that_of_the_layer(orthogonalizer: str, shape: tuple[int, int]) -> None:
    """B.3: √(fan_out/fan_in) whatever the size of M; fan_out is the number of rows of a Linear weight."""
    matrix = gaussian(*shape)
    sigma = torch.linalg.svdvals(isotropic(1e6 * matrix, orthogonalizer=orthogonalizer, scale="spectral"))
    assert sigma.mean().item() == pytest.approx((shape[0] / shape[1]) ** 0.5, rel=0.03)


@pytest.mark.parametrize("scale", [1e-44, 1e-30, 1e-20, 1e20, 1e37])
@pytest.mark.parametrize("options", [{}, {"scale": "rms"}, {"clip": "low"}, FAST, FAST | {"scale": "nuclear"}])
def test_tiny_and_huge_matrices_are_ordinary(scale: float, options: dict) -> None:
    matrix = gaussian(8, 5) * scale
    expected = isotropic(matrix.double(), **options)
    # in fp32, 1e-44 is seven units in the last place: only absolute accuracy can be asked of the result
    assert (isotropic(matrix, **options).double() - expected).abs().max() <= max(1e-5 * expected.abs().max(), 1e-45)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{}, {"clip": "high"}, {"scale": "spectral"}, FAST])
def test_result_has_shape_and_dtype_of_the_input(dtype: torch.dtype, options: dict) -> None:
    matrix = gaussian(7, 3, dtype=dtype)
    before = matrix.clone()
    result = isotropic(matrix, **options)
    assert (result.shape, result.dtype) == (matrix.shape, dtype)
    assert relative_error(result, isotropic(matrix.double(), **options)) < {
        torch.bfloat16: 1e-2,
        torch.float16: 1e-3,
    }.get(dtype, 1e-5)
    assert torch.equal(matrix, before), "the input must not be changed"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"orthogonalizer": "qr"}, "orthogonalizer='qr'"),
        ({"scale": "median"}, "scale='median'"),
        ({"clip": "both"}, "clip='both'"),
        ({"coefficients": "dio"}, "coefficients='dio'"),
        ({"orthogonalizer": "newton_schulz", "clip": "high"}, "orthogonalizer='svd'"),
        ({"scale": "rms", "clip": "high"}, "scale='mean'"),
    ],
)
def test_bad_options_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        isotropic(gaussian(4, 4), **options)


def test_svd_that_does_not_converge_is_repeated_in_fp64(monkeypatch: pytest.MonkeyPatch) -> None:
    """B.7: the drivers of an accelerator can give up on a matrix that LAPACK solves."""
    matrix = gaussian(8, 5)
    expected = isotropic(matrix)
    svd = torch.linalg.svd
    dtypes = []

    def giving_up_in_fp32(A: torch.Tensor, **options: bool) -> tuple[torch.Tensor, ...]:
        dtypes.append(A.dtype)
        if A.dtype == torch.float32:
            raise torch.linalg.LinAlgError("the algorithm failed to converge")
        return svd(A, **options)

    monkeypatch.setattr(torch.linalg, "svd", giving_up_in_fp32)
    assert relative_error(isotropic(matrix), expected) < 1e-5
    assert dtypes == [torch.float32, torch.float64]


def test_autocast_does_not_reach_the_reconstruction() -> None:
    matrix = gaussian(24, 40)
    expected = isotropic(matrix)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(isotropic(matrix), expected)


# ---- what callers that own the matrix can ask for ----

ALL_KINDS = [
    {},
    {"clip": "high"},
    {"scale": "rms"},
    {"scale": "nuclear"},
    {"scale": "spectral"},
    FAST,
    {"orthogonalizer": "newton_schulz", "scale": "nuclear"},
    {"orthogonalizer": "newton_schulz", "scale": "mean"},
    {"orthogonalizer": "newton_schulz", "scale": "spectral"},
]


@pytest.mark.parametrize("options", ALL_KINDS)
@pytest.mark.parametrize("shape", [(3, 30, 20), (2, 2, 20, 30), (3, 16, 16), (2, 90, 30), (2, 300, 600)])
def test_batch_is_a_loop_bit_for_bit(shape: tuple[int, ...], options: dict) -> None:
    """I14: on the CPU a batch gives what its matrices give one by one, each with a scale of its own."""
    batch = gaussian(*shape) * 10.0 ** torch.arange(shape[0]).view(-1, *[1] * (len(shape) - 1))
    batch[0, ..., 5:] = 0
    one_by_one = torch.stack([isotropic(matrix, **options) for matrix in batch.flatten(0, -3)]).view(shape)
    assert torch.equal(isotropic(batch, **options), one_by_one)


@pytest.mark.parametrize("options", ALL_KINDS)
@pytest.mark.parametrize("shape", [(30, 20), (20, 30), (2, 90, 30), (600, 300), (300, 600), (1, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_overwriting_gives_the_same_in_the_memory_of_the_input(
    shape: tuple[int, ...], options: dict, dtype: torch.dtype
) -> None:
    matrix = gaussian(*shape, dtype=dtype)
    expected = isotropic(matrix, **options)
    made = make_isotropic(matrix, overwrite=True, **options)
    assert made.matrix.data_ptr() == matrix.data_ptr()
    assert torch.equal(matrix, expected)
    assert (made.stable_rank_before, made.stable_rank_after) == (None, None)


@pytest.mark.parametrize("options", ALL_KINDS)
@pytest.mark.parametrize("shape", [(300, 20), (2, 20, 30), (2, 2, 9, 9), (300, 600)])
def test_stable_ranks_before_and_after(shape: tuple[int, ...], options: dict) -> None:
    """Exact with the SVD, within 6 % with Newton–Schulz; of zero matrices 0; and the result stays what it is."""
    matrix = gaussian(*shape) * 1e-20
    if len(shape) > 2:
        matrix[0] = 0
    made = make_isotropic(matrix, with_stable_rank=True, **options)
    assert torch.equal(made.matrix, isotropic(matrix, **options))
    for tensor, found in ((matrix, made.stable_rank_before), (made.matrix, made.stable_rank_after)):
        sigma = torch.linalg.svdvals(tensor.double())
        expected = (sigma.square().sum(-1) / sigma[..., 0] ** 2).nan_to_num(0)
        assert found is not None
        tolerance = 0.06 if options.get("orthogonalizer") else 1e-4
        torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=0)


def test_stable_rank_of_a_single_row_is_one() -> None:
    made = make_isotropic(torch.tensor([[[1.0, 2.0]], [[0.0, 0.0]]]), with_stable_rank=True)
    assert made.stable_rank_before is not None
    assert made.stable_rank_before.tolist() == [1, 0]


@pytest.mark.parametrize("options", [{}, {"clip": "low"}, FAST, FAST | {"scale": "spectral"}])
@pytest.mark.parametrize("batch", [(), (3,)])
def test_blocks_of_a_fused_matrix_are_matrices_of_their_own(batch: tuple[int, ...], options: dict) -> None:
    """q | k | v: each block of rows gets its own directions and its own length, even if it is one row."""
    matrix = gaussian(*batch, 16, 6)
    matrix[..., 8:12, :] *= 100
    result = isotropic(matrix, split_sizes=(8, 4, 3, 1), **options)
    blocks = [isotropic(block, **options) for block in matrix.split((8, 4, 3, 1), dim=-2)]
    assert torch.equal(result, torch.cat(blocks, dim=-2))
    made = make_isotropic(matrix, split_sizes=(8, 4, 3, 1), with_stable_rank=True, **options)
    assert made.stable_rank_after is not None
    assert made.stable_rank_after.shape == (*batch, 4)
    whole = make_isotropic(matrix.clone(), split_sizes=(8, 4, 3, 1), overwrite=True, **options)
    assert torch.equal(whole.matrix, result)


@pytest.mark.parametrize("split_sizes", [(8, 4), (8, 8, 0), (20, -4), ()])
def test_blocks_that_do_not_cut_the_rows_are_refused(split_sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="split_sizes"):
        isotropic(gaussian(16, 6), split_sizes=split_sizes)


@pytest.mark.parametrize("shape", [(0, 4), (3, 0, 4), (0, 5, 4)])
def test_empty_matrices(shape: tuple[int, ...]) -> None:
    made = make_isotropic(torch.zeros(shape), with_stable_rank=True)
    assert made.matrix.shape == shape
    assert made.stable_rank_before is not None
    assert made.stable_rank_before.shape == shape[:-2]


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(2, 12),
    cols=st.integers(2, 12),
    seed=st.integers(0, 10_000),
    options=st.sampled_from(ALL_KINDS),
    exponent=st.integers(-60, 60),
)
def test_equivariance_and_homogeneity(rows: int, cols: int, seed: int, options: dict, exponent: int) -> None:
    """I5, I7 for any shape: Iso(QMP) = Q Iso(M) P and Iso(−2ᵉM) = −2ᵉ Iso(M), the spectral scale's without 2ᵉ; fp64."""
    matrix, Q, P = (
        gaussian(rows, cols, seed=seed, dtype=torch.float64),
        orthogonal(rows, seed),
        orthogonal(cols, seed + 1),
    )
    result = isotropic(matrix, **options)
    assert relative_error(isotropic(Q @ matrix @ P, **options), Q @ result @ P) < 1e-6
    factor = -(2.0**exponent)
    expected = -result if options.get("scale") == "spectral" else result * factor
    assert relative_error(isotropic(matrix * factor, **options), expected) < 1e-12
