"""The outer round as an algorithm: what becomes of the parameters when all goes well, or when one call fails.

D, I and B numbers are those of the invariants and cases that the tests state. Everything here is one process; see
test_outer_round_faults.py for replicas that come, die and disagree, and tests/distributed for real ones.
"""

import copy
import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from isoloco.fleet import Done, Fleet, FleetError, SoloFleet, VirtualFleet
from isoloco.isotropic import isotropic
from isoloco.ledger import Ledger
from isoloco.outer_optimizer import OuterOptimizer
from isoloco.outer_round import NonFiniteError, OuterRound
from tests.unit.isoloco.toy_replica import SAMPLES_PER_STEP, ToyReplica, adamw, make_round, phase, sgd, train


def flat(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors.values()])


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Relative Frobenius error."""
    return float((flat(one) - flat(other)).norm() / flat(other).norm())


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return torch.equal(flat(one), flat(other))


def trained(num_replicas: int, **settings: Any) -> OuterRound:
    """A whole run with its own replicas."""
    replicas = [ToyReplica() for _ in range(num_replicas)]
    outer = make_round(VirtualFleet(range(num_replicas)), replicas, **settings)
    train(outer, replicas)
    return outer


class TestAlgorithm:
    @pytest.mark.parametrize("momentum", [0.0, 0.9])
    def test_d1_one_replica_with_unit_outer_step_is_plain_inner_training(self, momentum: float) -> None:
        # with momentum the identity holds for the first round: P = Δ + μΔ, so η = 1/(1 + μ)
        replica, plain = ToyReplica(), ToyReplica()
        num_rounds = 3 if momentum == 0 else 1
        lr = 1 / (1 + momentum)
        outer = make_round(SoloFleet(), [replica], lr=lr, momentum=momentum, total_steps=2 * num_rounds)
        train(outer, [replica])
        for step in range(2 * num_rounds):
            plain.learn(range(step * SAMPLES_PER_STEP, (step + 1) * SAMPLES_PER_STEP))
        assert replica.seen == plain.seen
        assert distance(replica.parameters, plain.parameters) < 1e-6
        for mine, theirs in zip(replica.inner.state.values(), plain.inner.state.values(), strict=True):
            assert mine["step"] == theirs["step"]
            torch.testing.assert_close(mine["exp_avg"], theirs["exp_avg"], rtol=1e-4, atol=1e-6)
        assert replica.schedule.last_epoch == plain.schedule.last_epoch == 2 * num_rounds

    @pytest.mark.parametrize("isotropic", [None, "newton_schulz"])
    @pytest.mark.parametrize("num_replicas", [2, 3, 4])
    def test_d2_identical_replicas_equal_one(self, num_replicas: int, isotropic: str | None) -> None:
        results = []
        for count in (1, num_replicas):
            replicas = [ToyReplica() for _ in range(count)]
            outer = make_round(VirtualFleet(range(count)), replicas, isotropic=isotropic)
            outer.start()
            for _ in range(3):
                for step in range(2):
                    losses = [replica.learn([7, 8, step]) for replica in replicas]
                    outer.after_step([10] * count, losses)
            results.append(outer.reference)
        if num_replicas in (2, 4):
            assert equal(*results)
        else:
            assert distance(*results) < 1e-6

    @pytest.mark.parametrize(
        ("momentum_kind", "expected"),
        [("nesterov", (0.867, 0.5443, 0.44637)), ("heavy_ball", (0.93, 0.727, 0.5793))],
    )
    def test_d4_golden_scalars_through_the_round(self, momentum_kind: str, expected: Sequence[float]) -> None:
        theta_i = torch.ones(1)
        outer = OuterRound(
            SoloFleet(),
            [{"scalar": theta_i}.items()],
            partial(OuterOptimizer, lr=0.7, momentum=0.9, momentum_kind=momentum_kind),
            Ledger(10),
            sync_steps=1,
            total_steps=3,
            samples_per_step=1,
            config={},
        )
        outer.start()
        for delta, theta in zip((0.1, 0.2, -0.05), expected, strict=True):
            theta_i -= delta
            outer.after_step([1], [0.0])
            assert theta_i.item() == pytest.approx(theta, abs=1e-6)
            assert outer.reference["scalar"].item() == theta_i.item()

    def test_d6_unit_step_without_momentum_is_the_mean_of_the_replicas(self) -> None:
        replicas = [ToyReplica() for _ in range(3)]
        outer = make_round(VirtualFleet(range(3)), replicas, lr=1.0, momentum=0.0, sync_steps=3, total_steps=3)
        outer.start()
        for step in range(3):
            losses = [replica.learn([10 * index + step]) for index, replica in enumerate(replicas)]
            before = [flat(replica.parameters) for replica in replicas]
            outer.after_step([1] * 3, losses)
        assert torch.stack(before).std(dim=0).max() > 1e-3, "the replicas must have drifted apart"
        torch.testing.assert_close(flat(outer.reference), torch.stack(before).mean(dim=0), rtol=1e-6, atol=1e-6)

    def test_d7_one_inner_sgd_step_is_data_parallel_sgd(self) -> None:
        replicas, whole = [ToyReplica(sgd) for _ in range(3)], ToyReplica(sgd)
        outer = make_round(VirtualFleet(range(3)), replicas, lr=1.0, momentum=0.0, sync_steps=1, total_steps=4)
        train(outer, replicas)
        for step in range(4):
            whole.learn(range(3 * SAMPLES_PER_STEP * step, 3 * SAMPLES_PER_STEP * (step + 1)))
        assert distance(outer.reference, whole.parameters) < 1e-6

    def test_d8_who_is_who_does_not_matter(self) -> None:
        results = []
        for order in ([0, 1, 2], [2, 0, 1]):
            replicas = [ToyReplica() for _ in range(3)]
            outer = make_round(VirtualFleet(range(3)), replicas)
            outer.start()
            for _ in range(3):
                for _ in range(2):
                    outer.after_step([1] * 3, [replicas[i].learn([10 * shard]) for i, shard in enumerate(order)])
            results.append(outer.reference)
        assert distance(*results) < 1e-6

    def test_d8_naming_the_replicas_in_another_order_changes_no_bit(self) -> None:
        results = []
        for ids in ([3, 10, 2], [10, 2, 3]):
            replicas = [ToyReplica() for _ in ids]
            outer = make_round(VirtualFleet(ids), replicas)
            train(outer, replicas)
            results.append(outer.reference)
        assert equal(*results)

    def test_d9_the_opposite_sign_on_both_sides_gives_the_same_bits(self) -> None:
        replicas = [ToyReplica() for _ in range(3)]
        outer = make_round(VirtualFleet(range(3)), replicas, lr=0.7, momentum=0.9)
        outer.start()
        theta = flat(outer.reference).clone()
        buffer = torch.zeros_like(theta)
        for round_number in range(3):
            outer.after_step([1] * 3, [replica.learn([index]) for index, replica in enumerate(replicas)])
            losses = [replica.learn([20 + index]) for index, replica in enumerate(replicas)]
            progress = [flat(replica.parameters) - theta for replica in replicas]  # θ_i − θ
            outer.after_step([1] * 3, losses)
            mean = (progress[0] + progress[1] + progress[2]) / 3
            buffer = buffer * 0.9 + mean
            theta = theta + (buffer * 0.9 + mean) * 0.7
            assert torch.equal(flat(outer.reference), theta), f"round {round_number + 1}"

    @pytest.mark.parametrize("stop_after_steps", [4, 5])
    def test_d10_stopped_and_resumed_equals_never_stopped(self, stop_after_steps: int) -> None:
        """At a boundary; in the middle of a round the run goes on from the boundary before it, with the same data."""
        ids = [0, 1]
        whole = [ToyReplica() for _ in ids]
        never_stopped = make_round(VirtualFleet(ids), whole, isotropic="svd", total_steps=8)
        train(never_stopped, whole)

        first = [ToyReplica() for _ in ids]
        outer = make_round(VirtualFleet(ids), first, isotropic="svd", total_steps=8)
        outer.start()
        for _ in range(2):
            phase(outer, first)
        saved = copy.deepcopy(outer.state_dict()["tensors"])
        record = json.dumps(outer.state_dict()["record"])
        own = copy.deepcopy([replica.own_state() for replica in first])
        seen = [list(replica.seen) for replica in first]
        for _ in range(stop_after_steps - 4):
            outer.after_step([10, 10], [replica.learn([0]) for replica in first])

        second = [ToyReplica(seed=1) for _ in ids]
        resumed = make_round(VirtualFleet(ids), second, isotropic="svd", total_steps=8)
        resumed.load_state_dict({"tensors": saved, "record": json.loads(record)})
        for replica, state, samples in zip(second, own, seen, strict=True):
            replica.load_own_state(state)
            replica.seen = samples
        train(resumed, second)

        assert (resumed.round, resumed.step) == (never_stopped.round, never_stopped.step) == (4, 8)
        assert resumed.digest() == never_stopped.digest()
        assert resumed.ledger == never_stopped.ledger
        assert resumed.committed_tokens == never_stopped.committed_tokens
        for mine, theirs in zip(second, whole, strict=True):
            assert mine.seen == theirs.seen
            assert equal(mine.parameters, theirs.parameters)
            assert mine.schedule.last_epoch == theirs.schedule.last_epoch
            for a, b in zip(mine.inner.state.values(), theirs.inner.state.values(), strict=True):
                assert all(torch.equal(torch.as_tensor(a[key]), torch.as_tensor(b[key])) for key in b)

    def test_i15_without_momentum_correcting_gradient_or_update_is_the_same(self) -> None:
        runs = [trained(2, isotropic="svd", momentum=0.0, target=target) for target in ("gradient", "update")]
        assert runs[0].digest() == runs[1].digest()
        assert runs[0].digest() != trained(2, momentum=0.0).digest()

    def test_i16_isoloco_that_excludes_every_matrix_is_diloco(self) -> None:
        assert trained(2, isotropic="newton_schulz", exclude=["*"]).digest() == trained(2).digest()
        assert trained(2, isotropic="newton_schulz").digest() != trained(2).digest()

    def test_i16_isoloco_on_a_model_without_matrices_is_diloco(self) -> None:
        digests = []
        for kind in (None, "svd"):
            replicas = [ToyReplica(matrix=False) for _ in range(2)]
            outer = make_round(VirtualFleet([0, 1]), replicas, isotropic=kind)
            train(outer, replicas)
            digests.append(outer.digest())
        assert digests[0] == digests[1]

    def test_i17_the_first_step_is_the_isotropic_mean_times_one_plus_momentum(self) -> None:
        replicas = [ToyReplica() for _ in range(2)]
        outer = make_round(VirtualFleet([0, 1]), replicas, isotropic="svd", lr=0.5, momentum=0.8, total_steps=1)
        outer.start()
        theta = outer.reference["matrix"].clone()
        losses = [replica.learn([index]) for index, replica in enumerate(replicas)]
        mean = torch.stack([theta - replica.values()["matrix"] for replica in replicas]).mean(dim=0)
        outer.after_step([1, 1], losses)
        expected = theta - 0.5 * 1.8 * isotropic(mean, orthogonalizer="svd", scale="mean")
        torch.testing.assert_close(outer.reference["matrix"], expected, rtol=1e-6, atol=1e-6)

    def test_i20_after_a_round_all_replicas_hold_the_reference(self) -> None:
        replicas = [ToyReplica() for _ in range(3)]
        outer = make_round(VirtualFleet(range(3)), replicas, isotropic="svd")
        outer.start()
        phase(outer, replicas)
        assert all(equal(replica.parameters, outer.reference) for replica in replicas)

    def test_replicas_that_start_apart_start_from_the_first_one_s_parameters(self) -> None:
        replicas = [ToyReplica(seed=seed) for seed in (5, 6)]
        first = replicas[0].values()
        make_round(VirtualFleet([0, 1]), replicas).start()
        assert all(equal(replica.parameters, first) for replica in replicas)

    def test_b40_one_replica_follows_the_closed_form_over_three_rounds(self) -> None:
        replica = ToyReplica()
        outer = make_round(SoloFleet(), [replica], lr=0.7, momentum=0.9)
        outer.start()
        expected = torch.nn.Parameter(flat(outer.reference).clone())
        optimizer = torch.optim.SGD([expected], lr=0.7, momentum=0.9, nesterov=True)
        for _ in range(3):
            outer.after_step([1], [replica.learn([1])])
            loss = replica.learn([2])
            expected.grad = expected.detach() - flat(replica.parameters)
            assert expected.grad.norm() > 1e-3
            outer.after_step([1], [loss])
            optimizer.step()
            torch.testing.assert_close(flat(outer.reference), expected.detach(), rtol=1e-6, atol=1e-6)


class TestWeights:
    def drifted(self, **settings: Any) -> tuple[OuterRound, Tensor, list[Tensor]]:
        """A round of three replicas with 10, 30 and 60 tokens: the round, θ before it, and Δ of each."""
        replicas = [ToyReplica() for _ in range(3)]
        outer = make_round(VirtualFleet(range(3)), replicas, lr=1.0, momentum=0.0, sync_steps=1, **settings)
        outer.start()
        theta = flat(outer.reference).clone()
        losses = [replica.learn([index]) for index, replica in enumerate(replicas)]
        deltas = [theta - flat(replica.parameters) for replica in replicas]
        self.report = outer.after_step([10, 30, 60], losses)
        return outer, theta, deltas

    def test_uniform_is_the_plain_mean(self) -> None:
        outer, theta, (a, b, c) = self.drifted(weights="uniform")
        torch.testing.assert_close(flat(outer.reference), theta - (a + b + c) / 3, rtol=1e-6, atol=1e-6)
        assert self.report.weights == {0: 1.0, 1: 1.0, 2: 1.0}

    def test_tokens_is_the_mean_over_tokens(self) -> None:
        outer, theta, (a, b, c) = self.drifted(weights="tokens")
        expected = theta - (0.1 * a + 0.3 * b + 0.6 * c)
        torch.testing.assert_close(flat(outer.reference), expected, rtol=1e-5, atol=1e-6)
        assert self.report.weights == {0: 10.0, 1: 30.0, 2: 60.0}

    def test_tokens_are_counted_from_the_last_agreed_parameters(self) -> None:
        replicas = [ToyReplica() for _ in range(2)]
        outer = make_round(VirtualFleet([0, 1]), replicas, weights="tokens")
        outer.start()
        reports = [phase(outer, replicas, tokens=[4, 6]) for _ in range(2)]
        assert [report.weights for report in reports] == [{0: 8.0, 1: 12.0}] * 2
        assert [report.tokens for report in reports] == [20, 20]
        assert outer.committed_tokens == 40


@pytest.mark.parametrize("bucket_bytes", [1, 4, 12, 28, 4 * 29, 10**6])
def test_the_size_of_the_buckets_changes_no_bit(bucket_bytes: int) -> None:
    assert trained(3, bucket_bytes=bucket_bytes).digest() == trained(3).digest()


def test_an_element_is_in_the_mean_whatever_the_bucket_size() -> None:
    """B24: every replica moves by its own constant; a tensor that a bucket left out would keep its value."""
    for bucket_bytes in (4, 16, 20, 48, 10**6):
        replicas = [ToyReplica() for _ in range(3)]
        outer = make_round(
            VirtualFleet(range(3)), replicas, lr=1.0, momentum=0.0, sync_steps=1, bucket_bytes=bucket_bytes
        )
        outer.start()
        theta = flat(outer.reference).clone()
        with torch.no_grad():
            for index, replica in enumerate(replicas):
                for parameter in replica.parameters.values():
                    parameter -= float(index + 1)
        outer.after_step([1] * 3, [0.0] * 3)
        torch.testing.assert_close(theta - flat(outer.reference), torch.full_like(theta, 2.0), rtol=1e-5, atol=1e-5)


class TestSchedule:
    def test_what_is_left_of_the_steps_is_a_last_shorter_round(self) -> None:
        replicas = [ToyReplica() for _ in range(2)]
        outer = make_round(VirtualFleet([0, 1]), replicas, total_steps=5)
        reports = train(outer, replicas)
        assert [(report.round, report.step, report.committed) for report in reports] == [
            (0, 0, False),
            (1, 2, True),
            (2, 4, True),
            (3, 5, True),
        ]
        assert outer.finished
        assert [sum(b - a for row in report.ledger for a, b in row["samples"]) for report in reports] == [0, 12, 12, 6]
        assert outer.ledger.grants == {0: [], 1: []}

    def test_a_completed_run_goes_on_with_more_steps(self) -> None:
        replicas = [ToyReplica()]
        short = make_round(SoloFleet(), replicas, total_steps=5)
        train(short, replicas)
        longer = make_round(SoloFleet(), replicas, total_steps=8)
        longer.load_state_dict(short.state_dict())
        reports = train(longer, replicas)
        assert [report.step for report in reports] == [5, 7, 8]
        assert replicas[0].seen == list(range(8 * SAMPLES_PER_STEP))

    def test_starting_a_completed_run_only_says_so(self) -> None:
        replicas = [ToyReplica()]
        outer = make_round(SoloFleet(), replicas)
        train(outer, replicas)
        again = make_round(SoloFleet(), [ToyReplica(seed=3)])
        again.load_state_dict(outer.state_dict())
        report = again.start()
        assert (report.committed, again.finished, again.digest()) == (False, True, outer.digest())

    @pytest.mark.parametrize("settings", [{"sync_steps": 0}, {"total_steps": 0}, {"weights": "loss"}])
    def test_impossible_settings_are_refused(self, settings: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match="must be"):
            make_round(SoloFleet(), [ToyReplica()], **settings)


class TestNonFinite:
    @staticmethod
    def spoil(replica: ToyReplica, value: float = math.nan) -> None:
        with torch.no_grad():
            replica.parameters["matrix"][1, 2] = value

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    def test_a_spoilt_replica_does_not_count_and_heals_from_the_reference(self, value: float) -> None:
        replicas = [ToyReplica() for _ in range(3)]
        outer = make_round(VirtualFleet(range(3)), replicas, lr=1.0, momentum=0.0, sync_steps=1)
        outer.start()
        theta = flat(outer.reference).clone()
        losses = [replica.learn([index]) for index, replica in enumerate(replicas)]
        healthy = [theta - flat(replicas[index].parameters) for index in (0, 2)]
        self.spoil(replicas[1], value)
        grant = outer.ledger.grants[1]
        report = outer.after_step([10, 10, 10], losses)
        assert report is not None

        assert report.committed
        assert report.participants == [0, 2]
        assert report.weights == {0: 1.0, 1: 0.0, 2: 1.0}
        assert report.reset_inner == [1]
        torch.testing.assert_close(flat(outer.reference), theta - (healthy[0] + healthy[1]) / 2, rtol=1e-6, atol=1e-6)
        assert all(equal(replica.parameters, outer.reference) for replica in replicas)
        assert {row["replica"] for row in report.ledger} == {0, 2}, "its samples are not consumed"
        assert outer.ledger.grants[1] == grant, "it reads them again"
        assert report.tokens == 20
        assert math.isfinite(report.loss)

    def test_it_counts_again_in_the_next_round(self) -> None:
        replicas = [ToyReplica() for _ in range(2)]
        outer = make_round(VirtualFleet([0, 1]), replicas, sync_steps=1)
        outer.start()
        self.spoil(replicas[0])
        outer.after_step([1, 1], [replica.learn([1]) for replica in replicas])
        replicas[0].inner = adamw(list(replicas[0].parameters.values()))  # what reset_inner asks for
        report = outer.after_step([1, 1], [replica.learn([2]) for replica in replicas])
        assert report is not None
        assert report.participants == [0, 1]

    def test_if_all_are_spoilt_the_run_ends_and_nothing_is_changed(self) -> None:
        replicas = [ToyReplica() for _ in range(2)]
        outer = make_round(VirtualFleet([0, 1]), replicas)
        outer.start()
        phase(outer, replicas)
        digest, ledger, round_number = outer.digest(), copy.deepcopy(outer.ledger), outer.round
        for replica in replicas:
            self.spoil(replica)
        outer.after_step([1, 1], [replica.learn([1]) for replica in replicas])
        with pytest.raises(NonFiniteError, match="round 2: every replica's pseudo-gradient is non-finite"):
            outer.after_step([1, 1], [replica.learn([2]) for replica in replicas])
        assert (outer.digest(), outer.ledger, outer.round) == (digest, ledger, round_number)

    def test_a_mean_that_overflows_ends_the_run_and_nothing_is_changed(self) -> None:
        replicas = [ToyReplica() for _ in range(2)]
        outer = make_round(VirtualFleet([0, 1]), replicas, sync_steps=1)
        outer.start()
        digest = outer.digest()
        for replica in replicas:
            self.spoil(replica, -3e38)
        with pytest.raises(NonFiniteError, match="averaged"):
            outer.after_step([1, 1], [0.0, 0.0])
        assert (outer.digest(), outer.round) == (digest, 0)


class FlakyFleet:
    """A fleet over another one, in which a chosen call fails a number of times."""

    def __init__(self, inner: Fleet, verb: str, times: int, before: Callable[[], None] = lambda: None) -> None:
        self.inner = inner
        self.local_replica_ids = inner.local_replica_ids
        self.device = inner.device
        self.num_bytes_sent = 0
        self.num_bytes_received = 0
        self.verb = verb
        self.times = times
        self.before = before
        self.armed = False

    def _fails(self, verb: str) -> bool:
        if verb != self.verb or not self.armed or self.times == 0:
            return False
        self.times -= 1
        self.before()
        return True

    def meet(self, metadata):  # type: ignore[no-untyped-def]
        if self._fails("meet"):
            raise FleetError("no quorum")
        return self.inner.meet(metadata)

    def to_owners(self, rows, sizes):  # type: ignore[no-untyped-def]
        if self._fails("to_owners"):
            return Broken()
        return self.inner.to_owners(rows, sizes)

    def from_owners(self, parts, sizes):  # type: ignore[no-untyped-def]
        return self.inner.from_owners(parts, sizes)

    def transfer(self, transfers):  # type: ignore[no-untyped-def]
        return self.inner.transfer(transfers)

    def agree(self, ok: bool) -> bool:
        return self.inner.agree(ok)

    def work(self, task):  # type: ignore[no-untyped-def]
        return self.inner.work(task)

    def hang_up(self) -> None:
        self.inner.hang_up()

    def vote(self, ok: bool) -> bool:
        return self.inner.vote(ok and not self._fails("vote"))

    def close(self) -> None:
        self.inner.close()


class Broken(Done[list[Tensor]]):
    """The handle of a communication that fails when it is waited for."""

    def __init__(self) -> None:
        super().__init__([])

    def wait(self) -> list[Tensor]:
        raise FleetError("the peer is gone")


class TestFailures:
    @pytest.mark.parametrize("verb", ["meet", "to_owners", "vote"])
    @pytest.mark.parametrize("times", [1, 2])
    def test_a_failed_round_is_repeated_with_the_same_work_and_ends_with_the_same_bits(
        self, verb: str, times: int
    ) -> None:
        replicas = [ToyReplica() for _ in range(2)]
        # buckets of 3 elements, so that a sum fails while others have succeeded
        fleet = FlakyFleet(VirtualFleet([0, 1]), verb, times)
        outer = make_round(fleet, replicas, isotropic="svd", bucket_bytes=12)
        outer.start()
        phase(outer, replicas)
        fleet.armed = True
        report = phase(outer, replicas)
        assert fleet.times == 0, "the fault must have struck"
        assert report.retries == times
        phase(outer, replicas)
        undisturbed = trained(2, isotropic="svd")
        assert outer.digest() == undisturbed.digest()
        assert outer.ledger == undisturbed.ledger
        assert sorted(replicas[0].seen + replicas[1].seen) == list(range(36)), "no step was repeated"

    @pytest.mark.parametrize("verb", ["to_owners", "vote"])
    def test_until_the_vote_nothing_changes_and_giving_up_leaves_the_last_round(self, verb: str) -> None:
        replicas = [ToyReplica() for _ in range(2)]
        fleet = FlakyFleet(VirtualFleet([0, 1]), verb, times=100)
        outer = make_round(fleet, replicas, max_retries=1)
        outer.start()
        phase(outer, replicas)

        def state() -> tuple[Any, ...]:
            return outer.digest(), copy.deepcopy(outer.ledger), outer.round, outer.step, outer.committed_tokens

        agreed = state()
        drifted: list[Tensor] = []
        seen: list[tuple[Any, ...]] = []
        fleet.armed = True
        fleet.before = lambda: (seen.append(state()), drifted.append(flat(replicas[0].parameters).clone()))
        with pytest.raises(FleetError, match="round 2 failed 2 times"):
            phase(outer, replicas)
        assert seen == [agreed, agreed]
        assert state() == agreed
        assert torch.equal(drifted[0], drifted[1]), "the work of the replica is kept"
        assert torch.equal(drifted[0], flat(replicas[0].parameters))
        assert not torch.equal(drifted[0], flat(outer.reference))


class TestReport:
    def test_tells_what_the_meeting_did(self) -> None:
        replicas = [ToyReplica() for _ in range(2)]
        outer = make_round(VirtualFleet([0, 1]), replicas, isotropic="svd", num_replica_groups=2)
        start = outer.start()
        assert (start.committed, start.round, start.participants, start.ledger) == (False, 0, [], [])
        assert math.isnan(start.loss)
        report = phase(outer, replicas, tokens=[5, 7])
        assert (report.committed, report.round, report.step) == (True, 1, 2)
        assert (report.registered, report.alive, report.participants) == (2, 2, [0, 1])
        assert report.digest == outer.digest() != start.digest
        assert report.tokens == 24
        assert (report.retries, report.healed_from, report.missed, report.reset_inner) == (0, None, [], [])
        assert set(report.seconds) == {"quorum", "exchange", "orthogonalize", "apply", "wait", "heal"}
        assert all(norm > 0 for norm in report.pseudo_gradient_norm.values())
        assert all(-1 <= cosine <= 1 for cosine in report.cosine.values())
        assert report.stable_rank is not None
        assert 1 <= report.stable_rank[0] < report.stable_rank[1] == pytest.approx(4, rel=0.05)

    def test_loss_is_the_mean_over_the_participants_tokens(self) -> None:
        replicas = [ToyReplica() for _ in range(2)]
        outer = make_round(VirtualFleet([0, 1]), replicas, sync_steps=1)
        outer.start()
        for replica in replicas:
            replica.learn([1])
        report = outer.after_step([10, 30], [torch.tensor(20.0), 40.0])
        assert report is not None
        assert report.loss == pytest.approx(60 / 40)

    def test_identical_replicas_point_where_their_mean_points(self) -> None:
        replicas = [ToyReplica() for _ in range(2)]
        outer = make_round(VirtualFleet([0, 1]), replicas, sync_steps=1)
        outer.start()
        report = outer.after_step([1, 1], [replica.learn([3]) for replica in replicas])
        assert report is not None
        assert report.cosine == pytest.approx({0: 1.0, 1: 1.0}, abs=1e-6)

    def test_replicas_that_cancel_each_other_have_no_direction(self) -> None:
        replicas = [ToyReplica() for _ in range(2)]
        outer = make_round(VirtualFleet([0, 1]), replicas, sync_steps=1)
        with torch.no_grad():
            for replica in replicas:
                replica.parameters["gain"].zero_()
        outer = make_round(VirtualFleet([0, 1]), replicas, sync_steps=1)
        outer.start()
        with torch.no_grad():
            replicas[0].parameters["gain"].add_(1.0)
            replicas[1].parameters["gain"].sub_(1.0)
        report = outer.after_step([1, 1], [0.0, 0.0])
        assert report is not None
        assert report.cosine == {0: 0.0, 1: 0.0}

    def test_its_record_goes_through_json_and_history_keeps_it(self) -> None:
        replicas = [ToyReplica() for _ in range(2)]
        outer = make_round(VirtualFleet([0, 1]), replicas)
        reports = train(outer, replicas)
        records = [report.record() for report in reports if report.committed]
        assert json.loads(json.dumps(records)) == records == outer.history

    def test_going_back_forgets_the_later_rounds(self) -> None:
        replicas = [ToyReplica()]
        outer = make_round(SoloFleet(), replicas)
        outer.start()
        phase(outer, replicas)
        state = copy.deepcopy(outer.state_dict())
        phase(outer, replicas)
        outer.load_state_dict(state)
        assert [record["round"] for record in outer.history] == [1]
