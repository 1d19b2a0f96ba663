"""The merging rules: golden values, algebra and edge cases. The ids (M1 …) are those of the invariants list."""

import math
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isoloco.aggregate import MEAN, OPTIONS, Aggregation, aggregate, check_aggregation, iso_cts_spaces
from isoloco.isotropic import isotropic

RULES = list(OPTIONS)
OF_MATRICES = ["iso_c", "iso_cts", "tsv_m"]
SHAPES = [(16, 24), (24, 16), (16, 16), (12, 60), (1, 5)]


def gaussian(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def workers(num: int, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Pseudo-gradients of workers that partly agree."""
    common = gaussian(*shape, seed=seed, dtype=dtype)
    return [common + gaussian(*shape, seed=100 * seed + i + 1, dtype=dtype) for i in range(num)]


def orthonormal(rows: int, cols: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.linalg.qr(gaussian(rows, cols, seed=seed, dtype=torch.float64)).Q.to(dtype)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-300))


# ---- all rules ----


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=20, deadline=None)
@given(
    num=st.integers(1, 5),
    rows=st.integers(1, 9),
    cols=st.integers(1, 9),
    seed=st.integers(0, 1000),
    exponent=st.integers(-30, 30),
)
def test_odd_and_homogeneous(rule: str, num: int, rows: int, cols: int, seed: int, exponent: int) -> None:
    """M7: merging c Δᵢ gives c times the merged Δᵢ, also for negative c; fp64, and for any number and shape."""
    deltas, factor = workers(num, rows, cols, seed=seed, dtype=torch.float64), -(2.0**exponent)
    result = aggregate(deltas, rule)
    assert relative_error(aggregate([delta * factor for delta in deltas], rule), result * factor) < 1e-6
    if rule not in OF_MATRICES:
        assert torch.equal(aggregate([delta * factor for delta in deltas], rule), result * factor)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("factor", [1e-6, 1e3, -1.0])
def test_homogeneous_in_fp32(rule: str, factor: float) -> None:
    """M7: 1e-5."""
    deltas = workers(3, 16, 24)
    assert (
        relative_error(aggregate([delta * factor for delta in deltas], rule), aggregate(deltas, rule) * factor) < 1e-5
    )


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shape", [*SHAPES, (7,), (2, 3, 4), ()])
def test_the_order_of_the_workers_does_not_matter(rule: str, shape: tuple[int, ...]) -> None:
    """M5, M6 and D8: 1e-4 in fp32, and the weights and masks go along with their workers."""
    deltas, weights, ids = workers(4, *shape), [1.0, 2.0, 3.0, 4.0], [7, 5, 3, 1]
    result = aggregate(deltas, rule, weights=weights, worker_ids=ids)
    reverse = aggregate(deltas[::-1], rule, weights=weights[::-1], worker_ids=ids[::-1])
    assert relative_error(reverse, result) < 1e-4


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_result_is_new_and_like_the_input(rule: str, dtype: torch.dtype) -> None:
    """Shape and dtype of the input; the arithmetic is fp32 at least; one worker's result is not its own tensor."""
    deltas = workers(3, 12, 20, dtype=dtype)
    before = [delta.clone() for delta in deltas]
    result = aggregate(deltas, rule)
    assert (result.shape, result.dtype) == ((12, 20), dtype)
    exact = aggregate([delta.double() for delta in deltas], rule)
    assert relative_error(result, exact) < {torch.bfloat16: 1e-2, torch.float16: 1e-3}.get(dtype, 1e-4)
    assert all(torch.equal(delta, kept) for delta, kept in zip(deltas, before, strict=True))
    assert aggregate(deltas[:1], rule).data_ptr() != deltas[0].data_ptr()


@pytest.mark.parametrize("rule", RULES)
def test_equal_weights_are_no_weights(rule: str) -> None:
    deltas = workers(4, 16, 24)
    assert relative_error(aggregate(deltas, rule, weights=[5.0] * 4), aggregate(deltas, rule)) < 1e-5


@pytest.mark.parametrize("rule", RULES)
def test_weight_zero_is_absence(rule: str) -> None:
    """Even of a worker whose values are NaN; and the others keep their masks."""
    deltas = workers(4, 16, 24)
    deltas[1] = torch.full_like(deltas[1], float("nan"))
    absent = aggregate([deltas[0], *deltas[2:]], rule, weights=[1.0, 3.0, 2.0], worker_ids=[0, 2, 3])
    assert torch.equal(aggregate(deltas, rule, weights=[1.0, 0.0, 3.0, 2.0]), absent)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("shape", [(6, 4), (5,)])
def test_non_finite_values_are_named(rule: str, bad: float, shape: tuple[int, ...]) -> None:
    deltas = workers(3, *shape)
    deltas[1].view(-1)[2] = bad
    with pytest.raises(ValueError, match="non-finite"):
        aggregate(deltas, rule)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shape", [(6, 4), (5,), (0,), (0, 3)])
def test_zeros_give_zeros(rule: str, shape: tuple[int, ...]) -> None:
    zeros = torch.zeros(shape)
    assert torch.equal(aggregate([zeros, zeros, zeros], rule), zeros)


@pytest.mark.parametrize("rule", OF_MATRICES)
@pytest.mark.parametrize("shape", [(7,), (2, 6, 4), ()])
def test_rules_of_matrices_take_the_mean_of_everything_else(rule: str, shape: tuple[int, ...]) -> None:
    deltas = workers(3, *shape)
    assert torch.equal(aggregate(deltas, rule, weights=[1.0, 2.0, 1.0]), aggregate(deltas, weights=[1.0, 2.0, 1.0]))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e20])
def test_tiny_and_huge_tensors_are_ordinary(rule: str, scale: float) -> None:
    deltas = workers(3, 16, 24)
    expected = aggregate([delta.double() for delta in deltas], rule)
    assert relative_error(aggregate([delta * scale for delta in deltas], rule).double() / scale, expected) < 1e-4


# ---- what is refused ----


@pytest.mark.parametrize(
    ("deltas", "arguments", "message"),
    [
        ([], {}, "empty"),
        ([torch.ones(2, 3), torch.ones(3, 2)], {}, "equal shapes"),
        ([torch.ones(2, dtype=torch.int64)], {}, "floating"),
        ([torch.ones(2)], {"rule": "median"}, "rule='median' is unknown"),
        ([torch.ones(2)] * 2, {"weights": [1.0]}, "2 pseudo-gradients, 1 weights"),
        ([torch.ones(2)] * 2, {"worker_ids": [1]}, "1 worker ids"),
        ([torch.ones(2)] * 2, {"weights": [1.0, -1.0]}, "weights="),
        ([torch.ones(2)] * 2, {"weights": [1.0, float("nan")]}, "weights="),
        ([torch.ones(2)] * 2, {"weights": [0.0, 0.0]}, "weights="),
        ([torch.ones(2)], {"sparsity": 0.1}, "sparsity=0.1 is no option of the rule 'mean'.*'ties', 'dare'"),
        ([torch.ones(2)], {"rule": "ties", "seed": 1}, "seed=1 is no option of the rule 'ties'.*'dare'"),
        ([torch.ones(2)], {"rule": "iso_cts", "decorrelate": False}, "decorrelate=False is no option"),
        ([torch.ones(2)], {"rule": "ties", "sparsity": 1.0}, "sparsity=1.0"),
        ([torch.ones(2)], {"rule": "dare", "sparsity": -0.1}, "sparsity=-0.1"),
        ([torch.ones(2)], {"rule": "iso_cts", "common_space_fraction": 1.5}, "common_space_fraction=1.5"),
        ([torch.ones(2)], {"rule": "tsv_m", "singular_ratio": 0.0}, "singular_ratio=0.0"),
    ],
)
def test_bad_arguments_are_refused(deltas: list[torch.Tensor], arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        aggregate(deltas, **arguments)


def test_a_rule_can_be_checked_before_there_is_anything_to_merge() -> None:
    check_aggregation("iso_cts", {"common_space_fraction": 0.5})
    with pytest.raises(ValueError, match="no rule has it"):
        check_aggregation("ties", {"density": 0.9})
    with pytest.raises(ValueError, match="unknown"):
        Aggregation("TIES")


def test_which_tensors_need_every_pseudo_gradient() -> None:
    """What is merely averaged can be summed on the way."""
    assert not MEAN.needs_every_delta((4, 5))
    for rule in OF_MATRICES:
        assert [Aggregation(rule).needs_every_delta(shape) for shape in ((4, 5), (4,), (2, 4, 5))] == [
            True,
            False,
            False,
        ]
    for rule in ("ties", "dare"):
        assert Aggregation(rule).needs_every_delta((4,))


def test_the_dataclass_does_what_the_function_does() -> None:
    deltas = workers(3, 16, 24)
    merged = Aggregation("dare", {"sparsity": 0.3}).merge(
        deltas, weights=[1.0, 2.0, 3.0], replica_ids=[4, 5, 6], name="w", round_number=3
    )
    arguments: dict[str, Any] = {"weights": [1.0, 2.0, 3.0], "worker_ids": [4, 5, 6], "name": "w", "round_number": 3}
    assert torch.equal(merged, aggregate(deltas, "dare", sparsity=0.3, **arguments))


# ---- mean and Iso-C ----


def test_mean() -> None:
    deltas = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, -6.0])]
    assert torch.equal(aggregate(deltas), torch.tensor([2.0, -2.0]))
    assert torch.equal(aggregate(deltas, weights=[3, 1]), torch.tensor([1.5, 0.0]))
    identical = [gaussian(5, 7)] * 4
    assert torch.equal(aggregate(identical), identical[0]), "D2: bit for bit when R is a power of two"


@pytest.mark.parametrize("shape", SHAPES)
def test_iso_c_is_the_isotropic_mean(shape: tuple[int, int]) -> None:
    """C.4: IsoLoCo's correction without momentum, in the scale of the mean; a single row stays the mean."""
    deltas = workers(3, *shape)
    expected = isotropic(aggregate(deltas, weights=[1.0, 2.0, 3.0]))
    assert torch.equal(aggregate(deltas, "iso_c", weights=[1.0, 2.0, 3.0]), expected)


# ---- Iso-CTS ----


def iso_cts_by_hand(deltas: list[torch.Tensor], common: int, own: int) -> torch.Tensor:
    """C.5 word by word, for full rank, with the sizes of the spaces given."""
    scaled = [delta / len(deltas) for delta in deltas]
    U, S, Vt = torch.linalg.svd(torch.stack(scaled).sum(0), full_matrices=False)
    lefts, sigmas, rights = [], [], []
    for delta in scaled:
        residual = delta - U[:, :common] @ U[:, :common].T @ delta
        left, sigma, right = torch.linalg.svd(residual, full_matrices=False)
        lefts.append(left[:, :own])
        sigmas.append(sigma[:own])
        rights.append(right[:own].T)
    lefts, sigmas, rights = [*lefts, U[:, :common]], [*sigmas, S[:common]], [*rights, Vt[:common].T]

    def polar(matrix: torch.Tensor) -> torch.Tensor:
        P, _, Qt = torch.linalg.svd(matrix, full_matrices=False)
        return P @ Qt

    return torch.cat(sigmas).mean() * polar(torch.cat(lefts, 1)) @ polar(torch.cat(rights, 1)).T


@pytest.mark.parametrize(
    ("shape", "num", "fraction", "common", "own"),
    [
        ((16, 24), 4, 0.8, 12, 1),  # the golden of C.5
        ((24, 16), 4, 0.8, 12, 1),
        ((16, 16), 4, 0.5, 8, 2),
        ((1024, 60), 8, 0.8, 44, 2),  # int(48.0), round(12 / 8) = 2 (to even), 60 - 16
        ((10, 30), 4, 0.8, 10, 0),  # round(2 / 4) = 0: nothing is left for the workers
        ((5, 9), 3, 0.0, 2, 1),  # round(5 / 3) = 2 would be more than there is
    ],
)
def test_iso_cts(shape: tuple[int, int], num: int, fraction: float, common: int, own: int) -> None:
    """C.5, with the sizes of the spaces; and M6: the spectrum is flat."""
    deltas = workers(num, *shape, dtype=torch.float64)
    result = aggregate(deltas, "iso_cts", common_space_fraction=fraction)
    assert relative_error(result, iso_cts_by_hand(deltas, common, own)) < 1e-10
    sigma = torch.linalg.svdvals(result)
    assert sigma[0].item() == pytest.approx(sigma[-1].item(), rel=1e-10)


@pytest.mark.parametrize(("r", "num", "common", "own"), [(1024, 8, 816, 26), (1536, 8, 1232, 38), (16, 4, 12, 1)])
def test_iso_cts_golden_sizes(r: int, num: int, common: int, own: int) -> None:
    """M6: how many directions are common and how many each worker's own, with the paper's fraction."""
    assert iso_cts_spaces(r, num, OPTIONS["iso_cts"]["common_space_fraction"]) == (common, own)


@pytest.mark.parametrize("shape", SHAPES)
def test_iso_cts_of_one_worker_or_without_own_spaces_is_iso_c(shape: tuple[int, int]) -> None:
    """M6: R = 1, or all of the space in common; also for a matrix of low rank."""
    deltas = workers(3, *shape)
    assert relative_error(aggregate(deltas[:1], "iso_cts"), aggregate(deltas[:1], "iso_c")) < 1e-4
    all_common = aggregate(deltas, "iso_cts", common_space_fraction=1.0)
    assert relative_error(all_common, aggregate(deltas, "iso_c")) < 1e-4
    low_rank = [gaussian(shape[0], 2) @ gaussian(2, shape[1], seed=1)]
    assert relative_error(aggregate(low_rank, "iso_cts"), aggregate(low_rank, "iso_c")) < 1e-4


def test_iso_cts_is_not_equivariant_under_transposition() -> None:
    """M6: the residual is projected from the left only. No error of ours: the published rule is like that."""
    deltas = workers(4, 16, 24)
    transposed = aggregate([delta.T for delta in deltas], "iso_cts")
    assert relative_error(transposed, aggregate(deltas, "iso_cts").T) > 0.1


def test_iso_cts_weights_scale_what_a_worker_gives_to_the_mean() -> None:
    deltas, weights = workers(4, 16, 24, dtype=torch.float64), [1.0, 2.0, 3.0, 2.0]
    scaled = [delta * 4 * weight / 8 for delta, weight in zip(deltas, weights, strict=True)]
    assert relative_error(aggregate(deltas, "iso_cts", weights=weights), aggregate(scaled, "iso_cts")) < 1e-10


# ---- TSV-M ----


def tsv_m_by_hand(deltas: list[torch.Tensor], k: int, decorrelate: bool = True) -> torch.Tensor:
    """C.3 word by word, for full rank."""
    svds = [torch.linalg.svd(delta, full_matrices=False) for delta in deltas]
    U, V = torch.cat([U[:, :k] for U, _, _ in svds], 1), torch.cat([Vt[:k].T for _, _, Vt in svds], 1)
    sigma = torch.cat([S[:k] for _, S, _ in svds])
    if decorrelate:
        (P, _, Qt), (P2, _, Qt2) = (torch.linalg.svd(each, full_matrices=False) for each in (U, V))
        U, V = P @ Qt, P2 @ Qt2
    return U @ torch.diag(sigma) @ V.T


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num", [2, 3, 8])
def test_tsv_m(shape: tuple[int, int], num: int) -> None:
    """C.3: the scale is that of the sum; k = max(1, ⌊r / R⌋), or a given share of r; raw without decorrelation."""
    deltas, r = workers(num, *shape, dtype=torch.float64), min(shape)
    if num <= max(r, 2) and r > 1:
        assert relative_error(aggregate(deltas, "tsv_m"), tsv_m_by_hand(deltas, max(1, r // num))) < 1e-8
    raw = aggregate(deltas, "tsv_m", decorrelate=False, singular_ratio=0.7)
    assert relative_error(raw, tsv_m_by_hand(deltas, max(1, int(0.7 * r)), decorrelate=False)) < 1e-10


def test_tsv_m_of_one_worker_is_its_pseudo_gradient() -> None:
    """M5: exactly."""
    delta = gaussian(16, 24)
    assert torch.equal(aggregate([delta], "tsv_m", weights=[3.0]), delta)


@pytest.mark.parametrize("shape", SHAPES[:-1])
def test_tsv_m_is_equivariant_under_transposition(shape: tuple[int, int]) -> None:
    """M5."""
    deltas = workers(4, *shape)
    assert relative_error(aggregate([delta.T for delta in deltas], "tsv_m"), aggregate(deltas, "tsv_m").T) < 1e-4


def test_tsv_m_adds_up_workers_that_have_nothing_in_common() -> None:
    """M5: mutually orthogonal row and column spaces of rank ≤ k give the exact sum; weights scale the parts."""
    U, V = orthonormal(16, 12), orthonormal(24, 12, seed=1)
    deltas = [(U[:, i : i + 3] * torch.tensor([3.0, 2.0, 1.0]) * (i + 1)) @ V[:, i : i + 3].T for i in (0, 3, 6, 9)]
    assert relative_error(aggregate(deltas, "tsv_m"), torch.stack(deltas).sum(0)) < 1e-5
    weights = [1.0, 2.0, 3.0, 2.0]
    weighted = torch.stack([delta * weight / 2 for delta, weight in zip(deltas, weights, strict=True)]).sum(0)
    assert relative_error(aggregate(deltas, "tsv_m", weights=weights), weighted) < 1e-5


def test_tsv_m_does_not_exceed_the_largest_singular_value() -> None:
    """M5: its singular vectors are orthonormal as long as kR ≤ r."""
    deltas = workers(4, 16, 24)
    largest = max(torch.linalg.svdvals(delta)[0].item() for delta in deltas)
    assert torch.linalg.svdvals(aggregate(deltas, "tsv_m"))[0].item() <= largest * (1 + 1e-5)


@pytest.mark.parametrize("rule", ["tsv_m", "iso_cts"])
def test_arbitrary_singular_vectors_do_not_count(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The vectors that a library returns for null directions do not reach the result, even where workers are alike."""
    deltas = [gaussian(16, 2) @ gaussian(2, 24, seed=1)] * 3 + [gaussian(16, 1, seed=2) @ gaussian(1, 24, seed=3)]
    result = aggregate(deltas, rule)
    svd = torch.linalg.svd

    def another_library(A: torch.Tensor, **options: bool) -> tuple[torch.Tensor, ...]:
        U, S, Vt = svd(A, **options)
        null = 1e-4 * S[0, 0] > S[0]
        U[..., null] = U[..., null] @ orthonormal(int(null.sum()), int(null.sum()), seed=4)
        Vt[:, null] = orthonormal(int(null.sum()), int(null.sum()), seed=5) @ Vt[:, null]
        return U, S, Vt

    monkeypatch.setattr(torch.linalg, "svd", another_library)
    assert relative_error(aggregate(deltas, rule), result) < 1e-4


# ---- TIES ----

TIES_GOLDEN = [torch.tensor(row) for row in ([0.5, -0.2, 0.1, 0.0], [-0.1, -0.4, 0.3, 0.2], [0.2, 0.5, -0.6, 0.0])]


def test_ties_golden() -> None:
    """M1, without trimming. 1e-7."""
    expected = torch.tensor([0.35, -0.30, -0.60, 0.20])
    torch.testing.assert_close(aggregate(TIES_GOLDEN, "ties", sparsity=0.0), expected, rtol=0, atol=1e-7)


@pytest.mark.parametrize(("numel", "kept"), [(1, 1), (4, 3), (10, 9), (1024, 921)])
@pytest.mark.parametrize("rule", ["ties", "dare"])
def test_exactly_so_many_entries_stay(rule: str, numel: int, kept: int) -> None:
    """M3, M4: k = max(1, ⌊0.9 numel⌋) of each worker, also where all are equally large."""
    assert int((aggregate([torch.ones(numel)], rule) != 0).sum()) == kept
    assert int((aggregate([gaussian(numel)], rule) != 0).sum()) == kept


def test_ties_without_trimming_is_the_mean_where_signs_agree() -> None:
    """M2."""
    deltas = [gaussian(6, 8, seed=i).abs() for i in range(3)]
    assert relative_error(aggregate(deltas, "ties", sparsity=0.0), aggregate(deltas)) < 1e-6


def test_ties_of_identical_workers_is_the_trimmed_pseudo_gradient() -> None:
    """M2: the smallest tenth is gone, and that is a tenth of each tensor."""
    delta = gaussian(10, 12)
    expected = torch.where(delta.abs() > delta.abs().flatten().kthvalue(12).values, delta, 0)
    torch.testing.assert_close(aggregate([delta] * 3, "ties"), expected, rtol=1e-6, atol=0)


def test_ties_where_the_sum_is_zero_is_zero() -> None:
    """M3."""
    deltas = [torch.tensor([1.0, 2.0]), torch.tensor([-1.0, 1.0])]
    assert torch.equal(aggregate(deltas, "ties", sparsity=0.0), torch.tensor([0.0, 1.5]))


def test_ties_weights_count_in_the_vote_and_in_the_mean() -> None:
    deltas = [torch.tensor([3.0, 1.0]), torch.tensor([-2.0, 2.0]), torch.tensor([-4.0, 4.0])]
    result = aggregate(deltas, "ties", sparsity=0.0, weights=[1.0, 3.0, 1.0])
    torch.testing.assert_close(result, torch.tensor([-(3 * 2 + 4) / 4, (1 + 3 * 2 + 4) / 5]))


def test_ties_works_through_a_tensor_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    deltas = workers(3, 16, 24)
    expected = aggregate(deltas, "ties")
    monkeypatch.setattr(sys.modules["isoloco.aggregate"], "_CHUNK", 50)
    assert torch.equal(aggregate(deltas, "ties"), expected)


# ---- DARE ----


def test_dare_without_sparsity_is_the_mean() -> None:
    """M4."""
    deltas = workers(3, 6, 8)
    assert torch.equal(aggregate(deltas, "dare", sparsity=0.0), aggregate(deltas))


def test_dare_rescales_what_stays() -> None:
    """C.2: divided by 1 − sparsity, or not."""
    delta = gaussian(40)
    result = aggregate([delta], "dare")
    stays = result != 0
    torch.testing.assert_close(result, torch.where(stays, delta / 0.9, 0))
    assert torch.equal(aggregate([delta], "dare", rescale=False), torch.where(stays, delta, 0))


def test_dare_keeps_the_mean_on_average() -> None:
    """M4: over many masks, the mean times (k / numel) / 0.9, within four standard errors."""
    deltas = workers(2, 15)
    num = 3000
    average = torch.stack([aggregate(deltas, "dare", seed=seed) for seed in range(num)]).double().mean(0)
    share = 13 / 15
    expected = aggregate(deltas).double() * share / 0.9
    deviation = torch.stack(deltas).double().square().sum(0).sqrt() / 2 / 0.9 * math.sqrt(share * (1 - share) / num)
    assert ((average - expected).abs() <= 4 * deviation).all()


def test_dare_masks_are_independent_and_reproducible() -> None:
    """M4: the same again for the same seed; another for every seed, worker, round, tensor; or one for all workers."""
    ones = torch.ones(200)

    def mask(**arguments: Any) -> tuple[bool, ...]:
        return tuple((aggregate([ones], "dare", sparsity=0.5, **arguments) > 0).tolist())

    variants: list[dict[str, Any]] = [{}, {"seed": 1}, {"worker_ids": [1]}, {"round_number": 1}, {"name": "w"}]
    assert mask() == mask(), "reproducible"
    assert len({mask(**variant) for variant in variants}) == len(variants)
    counts = aggregate([ones] * 2, "dare", sparsity=0.5, rescale=False)
    assert set(counts.tolist()) == {0.0, 0.5, 1.0}
    counts = aggregate([ones] * 2, "dare", sparsity=0.5, rescale=False, shared_masks=True)
    assert set(counts.tolist()) == {0.0, 1.0}


def test_dare_golden_mask() -> None:
    """The masks are part of a run's numbers: they may not change between versions, machines or devices."""
    result = aggregate([torch.arange(1.0, 11.0)], "dare", sparsity=0.5, rescale=False, name="w", round_number=2)
    assert result.nonzero().flatten().tolist() == [2, 3, 4, 5, 7]
