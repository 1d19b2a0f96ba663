"""The pseudo-gradients of many members become one, each matrix corrected by one of them, the same bits for all."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from isoloco.aggregate import MEAN, Aggregation
from isoloco.fleet import VirtualFleet
from isoloco.isotropic import isotropic
from isoloco.outer_optimizer import NonFiniteError, OuterOptimizer
from isoloco.pseudo_gradients import Members, PseudoGradients
from tests.unit.isoloco.thread_fleet import Network, ThreadFleet, run_threads

SHAPES = {"embedding": (30, 8), "up": (12, 8), "gain": (8,), "down": (8, 12), "square": (8, 8), "bias": (5,)}
MATRICES = ("embedding", "up", "down", "square")
Named = dict[str, torch.Tensor]


def tensors(seed: int, size: float = 1.0) -> Named:
    generator = torch.Generator().manual_seed(seed)
    return {name: size * torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def reference() -> Named:
    return tensors(seed=0)


def trained(member: int) -> Named:
    drift = tensors(seed=1 + member, size=0.1)
    return {name: theta - drift[name] for name, theta in reference().items()}


def delta(member: int, name: str) -> torch.Tensor:
    return reference()[name] - trained(member)[name]


def weighted_mean(weights: Sequence[float], name: str) -> torch.Tensor:
    return sum(w * delta(member, name) for member, w in enumerate(weights) if w > 0) / sum(weights)


@dataclasses.dataclass
class Result:
    gradients: Named
    updates: Named
    num_matrices: int
    stable_ranks: list[tuple[float, float]]
    norm: float
    products: list[float]
    norms: list[float]


def combine(
    fleet: Any, local: Sequence[int], weights: Sequence[float], aggregation: Aggregation = MEAN, **options: Any
) -> Result:
    theta = reference()
    optimizer = OuterOptimizer(theta.items(), **({"lr": 0.7, "isotropic": "svd"} | options))
    for name, parameter in theta.items():  # a momentum that earlier rounds have left
        if "momentum_buffer" in optimizer.state[parameter]:
            optimizer.state[parameter]["momentum_buffer"].copy_(tensors(seed=99)[name])
    pseudo_gradients = PseudoGradients(
        fleet,
        theta,
        [trained(position) for position in local],
        optimizer,
        aggregation,
        group=None,
        bucket_bytes=200 * len(weights),
    )
    norms = pseudo_gradients.norms()
    ids = [10 * position for position in range(len(weights))]
    seconds = {"exchange": 0.0, "orthogonalize": 0.0, "wait": 0.0}
    combined = pseudo_gradients.combine(Members(ids, weights, local), round_number=1, seconds=seconds)
    gradients = {name: parameter.grad for name, parameter in theta.items() if parameter.grad is not None}
    updates = dict(zip(MATRICES, optimizer.updates(MATRICES), strict=True)) if optimizer.target == "update" else {}
    return Result(
        gradients,
        updates,
        optimizer.whole_matrices.num_matrices,
        combined.stable_ranks,
        combined.norm,
        combined.products,
        norms,
    )


def by_threads(weights: Sequence[float], **options: Any) -> list[Result]:
    """Every member on its own, as replica groups are."""
    network = Network()
    fleets = [ThreadFleet(network, position) for position in range(len(weights))]

    def member(position: int) -> Result:
        fleets[position].meet([{}])
        result = combine(fleets[position], [position], weights, **options)
        fleets[position].vote(True)
        return result

    return list(run_threads({p: lambda p=p: member(p) for p in range(len(weights))}).values())


def in_one_process(weights: Sequence[float], **options: Any) -> Result:
    return combine(VirtualFleet(range(len(weights))), range(len(weights)), weights, **options)


def assert_all_equal(results: Sequence[Result]) -> None:
    for result in results[1:]:
        for ours, theirs in ((result.gradients, results[0].gradients), (result.updates, results[0].updates)):
            assert ours.keys() == theirs.keys()
            for name in ours:
                assert torch.equal(ours[name], theirs[name]), name
        assert result.stable_ranks == results[0].stable_ranks


@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.0, 1.0, 1.0), (3.0, 1.0, 2.0, 0.5)])
def test_matrices_are_isotropic_means_and_the_rest_are_means(weights: Sequence[float]) -> None:
    result = in_one_process(weights)
    for name in SHAPES:
        mean = weighted_mean(weights, name)
        expected = isotropic(mean) if name in MATRICES else mean
        torch.testing.assert_close(result.gradients[name], expected)


@pytest.mark.parametrize("weights", [(1.0,), (1.0, 1.0), (1.0, 1.0, 1.0), (3.0, 1.0, 2.0, 0.5), (1.0, 0.0, 2.0)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"isotropic": "newton_schulz", "scale": "rms", "exclude": ["embedding"]},
        {"isotropic": None},
        {"target": "update"},
        {"target": "update", "momentum_kind": "heavy_ball"},
        {"target": "update", "momentum": 0.0},
    ],
    ids=str,
)
def test_many_processes_and_one_get_the_same_bits(weights: Sequence[float], options: dict[str, Any]) -> None:
    assert_all_equal([in_one_process(weights, **options), *by_threads(weights, **options)])


def test_each_matrix_is_corrected_once_in_the_whole_run() -> None:
    results = by_threads((1.0, 1.0, 1.0))
    assert sum(result.num_matrices for result in results) == len(MATRICES)
    assert all(result.num_matrices >= 1 for result in results), "and everybody has some"


def test_who_does_not_count_owns_nothing_and_gets_everything() -> None:
    results = by_threads((1.0, 0.0, 1.0))
    assert results[1].num_matrices == 0
    assert_all_equal(results)
    torch.testing.assert_close(results[1].gradients["gain"], weighted_mean((1.0, 0.0, 1.0), "gain"))


def test_the_numbers_of_who_does_not_count_are_never_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    real = trained

    def spoilt(member: int) -> Named:
        return real(member) if member != 1 else {name: torch.full(shape, torch.nan) for name, shape in SHAPES.items()}

    monkeypatch.setitem(globals(), "trained", spoilt)
    results = by_threads((1.0, 0.0, 1.0))
    for result in results:
        assert all(bool(gradient.isfinite().all()) for gradient in result.gradients.values())


def test_an_update_is_made_isotropic_after_momentum_has_taken_in_the_mean() -> None:
    result = in_one_process((1.0, 1.0), target="update", momentum=0.9)
    mean = weighted_mean((1.0, 1.0), "up")
    torch.testing.assert_close(result.gradients["up"], mean)
    update = mean + 0.9 * (0.9 * tensors(seed=99)["up"] + mean)
    torch.testing.assert_close(result.updates["up"], isotropic(update))


def test_a_mean_that_is_not_finite_is_seen_by_all() -> None:
    """Two finite pseudo-gradients whose sum is not."""
    huge = 3e38

    def member(position: int, network: Network, fleets: list[ThreadFleet]) -> str:
        fleet = fleets[position]
        fleet.meet([{}])
        theta = {"matrix": torch.zeros(4, 4), "gain": torch.zeros(4)}
        moved = {"matrix": torch.full((4, 4), -huge), "gain": torch.zeros(4)}
        pseudo_gradients = PseudoGradients(
            fleet,
            theta,
            [moved],
            OuterOptimizer(theta.items(), lr=1.0, isotropic="svd"),
            MEAN,
            group=None,
            bucket_bytes=99,
        )
        seconds = {"exchange": 0.0, "orthogonalize": 0.0, "wait": 0.0}
        with pytest.raises(NonFiniteError, match="non-finite"):
            pseudo_gradients.combine(Members([0, 1], [1.0, 1.0], [position]), round_number=1, seconds=seconds)
        fleet.vote(False)
        return "seen"

    network = Network()
    fleets = [ThreadFleet(network, position) for position in range(2)]
    seen = run_threads({p: lambda p=p: member(p, network, fleets) for p in range(2)})
    assert list(seen.values()) == ["seen", "seen"]


@pytest.mark.parametrize("aggregation", [MEAN, Aggregation("ties")])
def test_what_is_reported_of_the_mean_is_of_the_mean_before_any_correction(aggregation: Aggregation) -> None:
    weights = (1.0, 0.0, 2.0)
    results = by_threads(weights, aggregation=aggregation)
    mean = torch.cat([weighted_mean(weights, name).flatten() for name in SHAPES]).double()
    for member, result in enumerate(results):
        own = torch.cat([delta(member, name).flatten() for name in SHAPES]).double()
        assert result.norm == pytest.approx(mean.norm().item())
        assert result.norms == pytest.approx([own.norm().item()])
        assert result.products == pytest.approx([(own @ mean).item() if weights[member] > 0 else 0.0])
    whole = in_one_process(weights, aggregation=aggregation)
    assert whole.products == pytest.approx([result.products[0] for result in results])


def test_stable_ranks_are_of_every_matrix_before_and_after() -> None:
    result = in_one_process((1.0, 1.0))
    assert len(result.stable_ranks) == len(MATRICES)
    for name, (before, after) in zip(MATRICES, result.stable_ranks, strict=True):
        sigma = torch.linalg.svdvals(weighted_mean((1.0, 1.0), name))
        assert before == pytest.approx((sigma.square().sum() / sigma[0] ** 2).item(), rel=1e-3)
        assert after == pytest.approx(min(SHAPES[name]), rel=1e-3)


RULES = {
    "ties": Aggregation("ties"),
    "dare": Aggregation("dare", {"seed": 3}),
    "tsv_m": Aggregation("tsv_m"),
    "iso_cts": Aggregation("iso_cts"),
    "iso_c": Aggregation("iso_c"),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0), (2.0, 0.0, 1.0), (1.0,)])
def test_a_merging_rule_gets_every_pseudo_gradient_whole(rule: str, weights: Sequence[float]) -> None:
    results = [in_one_process(weights, aggregation=RULES[rule], isotropic=None)]
    results += by_threads(weights, aggregation=RULES[rule], isotropic=None)
    assert_all_equal(results)
    for name in SHAPES:
        expected = RULES[rule].merge(
            [delta(member, name) for member in range(len(weights))],
            weights=weights,
            replica_ids=[10 * member for member in range(len(weights))],
            name=name,
            round_number=1,
        )
        torch.testing.assert_close(results[0].gradients[name], expected)


def test_a_tensor_is_merged_once_in_the_whole_run() -> None:
    results = by_threads((1.0, 1.0, 1.0), aggregation=RULES["ties"], isotropic=None)
    assert sum(result.num_matrices for result in results) == len(SHAPES)
    results = by_threads((1.0, 1.0, 1.0), aggregation=RULES["tsv_m"], isotropic=None)
    assert sum(result.num_matrices for result in results) == len(MATRICES)


def test_a_correction_that_is_not_finite_is_seen_by_all_before_the_vote(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the SVD of an accelerator may return; the average itself is finite."""
    real = OuterOptimizer.correct

    def spoil(optimizer: OuterOptimizer, names: Sequence[str]) -> dict[str, tuple[float, float]]:
        told = real(optimizer, names)
        for name, parameter in optimizer._named.items():
            if name == "up" and name in names:
                assert parameter.grad is not None
                parameter.grad[0, 0] = torch.nan
        return told

    monkeypatch.setattr(OuterOptimizer, "correct", spoil)
    network = Network()
    fleets = [ThreadFleet(network, position) for position in range(2)]

    def member(position: int) -> str:
        fleets[position].meet([{}])
        with pytest.raises(NonFiniteError):
            combine(fleets[position], [position], (1.0, 1.0))
        fleets[position].vote(False)
        return "seen"

    assert list(run_threads({p: lambda p=p: member(p) for p in range(2)}).values()) == ["seen", "seen"]
