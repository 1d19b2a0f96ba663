"""The outer round among replicas that come late, die, disagree and lose votes: real rounds, in threads.

Each replica has its own OuterRound, ledger and history, as each replica group of a real run has.
"""

import copy
import random
import threading
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isoloco.admission import HistoryError, StrangerError
from isoloco.fleet import FleetError, VirtualFleet
from isoloco.outer_round import NonFiniteError, OuterRound, RoundReport
from tests.unit.isoloco.thread_fleet import CrashError, Fault, Network, ThreadFleet, run_threads
from tests.unit.isoloco.toy_replica import SAMPLES_PER_EPOCH, ToyReplica, make_round, phase, train


def no_fault(verb: str) -> None:
    return None


class Nth:
    """A fault that strikes at the n-th time of a verb, once it is armed."""

    def __init__(self, verb: str, kind: str, nth: int = 1, *, armed: bool = True) -> None:
        self.verb, self.kind, self.left, self.armed = verb, kind, nth, armed

    def __call__(self, verb: str) -> str | None:
        if not self.armed or verb != self.verb:
            return None
        self.left -= 1
        return self.kind if self.left == 0 else None

    @property
    def struck(self) -> bool:
        return self.left <= 0


class Site:
    """A replica group: its line to the others, its replica, its round, and all reports of its meetings."""

    def __init__(self, network: Network, replica_id: int, fault: Fault = no_fault, seed: int = 0, **settings: Any):
        self.replica_id = replica_id
        self.fleet = ThreadFleet(network, replica_id, fault)
        self.replica = ToyReplica(seed=seed)
        self.outer: OuterRound = make_round(self.fleet, [self.replica], **settings)
        self.reports: list[RoundReport] = []

    def start(self) -> RoundReport:
        self.reports.append(self.outer.start())
        return self.reports[-1]

    def phase(self) -> RoundReport:
        self.reports.append(phase(self.outer, [self.replica]))
        return self.reports[-1]

    def train(self, until_round: int | None = None) -> list[RoundReport]:
        """Start if it has not, and train to the end, or until a round is committed."""
        if not self.reports:
            self.start()
        while not self.outer.finished and (until_round is None or self.outer.round < until_round):
            self.phase()
        return self.reports

    def theta(self) -> torch.Tensor:
        return torch.cat([tensor.flatten() for tensor in self.outer.reference.values()])

    def delta(self) -> torch.Tensor:
        return self.theta() - torch.cat([p.detach().flatten() for p in self.replica.parameters.values()])


def side_by_side(*tasks: Callable[[], Any]) -> list[Any]:
    return list(run_threads(dict(enumerate(tasks))).values())


def assert_one_history(sites: Sequence[Site]) -> None:
    """All hold the same state, tell the same history, and no sample was trained on twice or lost."""
    first = sites[0].outer
    for site in sites:
        outer = site.outer
        assert outer.digest() == first.digest()
        assert outer.ledger == first.ledger
        assert outer.history == first.history
        assert (outer.round, outer.step, outer.run_id) == (first.round, first.step, first.run_id)
        assert outer.committed_tokens == first.committed_tokens
    assert [record["round"] for record in first.history] == list(range(1, first.round + 1))
    committed = [
        row["epoch"] * SAMPLES_PER_EPOCH + sample
        for record in first.history
        for row in record["ledger"]
        for start, stop in row["samples"]
        for sample in range(start, stop)
    ]
    ledger = first.ledger
    granted = [sample for grant in ledger.grants.values() for a, b in grant for sample in range(a, b)]
    returned = [sample for a, b in ledger.returned for sample in range(a, b)]
    assert sorted(committed + granted + returned) == list(range(ledger.cursor))


def test_sites_that_meet_equal_a_simulation_bit_for_bit() -> None:
    network = Network()
    sites = [Site(network, replica_id, isotropic="svd", num_replica_groups=3) for replica_id in (10, 2, 5)]
    side_by_side(*(site.train for site in sites))
    assert_one_history(sites)
    replicas = [ToyReplica() for _ in range(3)]
    simulation = make_round(VirtualFleet([2, 5, 10]), replicas, isotropic="svd", num_replica_groups=3)
    train(simulation, replicas)
    assert simulation.digest() == sites[0].outer.digest()
    assert simulation.ledger == sites[0].outer.ledger
    assert simulation.history == sites[0].outer.history


class TestJoiners:
    def test_b23_a_joiner_is_healed_has_no_weight_and_counts_in_the_next_round(self) -> None:
        settings = {"lr": 1.0, "momentum": 0.9, "num_replica_groups": 1, "total_steps": 20, "isotropic": None}
        network = Network()
        old = Site(network, 0, **settings)
        old.train(until_round=3)
        new = Site(network, 1, seed=7, **settings)
        theta_before, buffer = old.theta().clone(), momentum(old)
        side_by_side(old.phase, new.start)
        # the joiner's parameters are junk to this round: it is a step of the old group alone
        assert old.reports[-1].weights == new.reports[-1].weights == {0: 1.0, 1: 0.0}
        assert old.reports[-1].participants == [0]
        assert new.reports[-1].healed_from == 0
        assert new.reports[-1].committed
        assert [record["round"] for record in new.reports[-1].missed] == [1, 2, 3]
        assert new.reports[-1].missed == old.outer.history[:3]
        assert_one_history([old, new])
        assert torch.equal(momentum(new), momentum(old))
        assert not torch.equal(momentum(old), buffer)
        assert not torch.equal(old.theta(), theta_before)
        assert torch.equal(new.delta(), torch.zeros_like(new.delta())), "θ_i ← θ"

        # in the next round the update is the exact mean over two independent contributions
        theta, buffer = old.theta().clone(), momentum(old)
        deltas: dict[int, torch.Tensor] = {}

        def contribute(site: Site) -> None:
            for step in range(2):
                loss = site.replica.learn([10 * site.replica_id + step])
                deltas[site.replica_id] = site.delta()
                site.reports.append(site.outer.after_step([10], [loss]))  # type: ignore[arg-type]

        side_by_side(lambda: contribute(old), lambda: contribute(new))
        assert not torch.allclose(deltas[0], deltas[1])
        mean = (deltas[0] + deltas[1]) / 2
        torch.testing.assert_close(old.theta(), theta - (mean + 0.9 * (0.9 * buffer + mean)), rtol=1e-5, atol=1e-6)
        assert new.reports[-1].weights == {0: 1.0, 1: 1.0}
        assert_one_history([old, new])

    def test_two_joiners_are_healed_by_different_donors_in_one_round(self) -> None:
        network = Network()
        old = [Site(network, replica_id, num_replica_groups=2, total_steps=8) for replica_id in (0, 1)]
        side_by_side(*(lambda site=site: site.train(until_round=1) for site in old))
        new = [Site(network, replica_id, num_replica_groups=2, total_steps=8, seed=replica_id) for replica_id in (2, 3)]
        side_by_side(*(site.train for site in old + new))
        assert [site.reports[0].healed_from for site in new] == [0, 1]
        assert_one_history(old + new)
        assert old[0].reports[-1].participants == [0, 1, 2, 3]

    def test_a_donor_that_dies_while_it_heals_does_not_stop_the_joiner(self) -> None:
        network = Network()
        dies = Nth("send", "crash", nth=3)
        old = [Site(network, 0, dies, num_replica_groups=2, total_steps=8), Site(network, 1, total_steps=8)]
        old[1].outer._num_replica_groups = 2
        side_by_side(*(lambda site=site: site.train(until_round=1) for site in old))
        new = Site(network, 2, num_replica_groups=2, total_steps=8, seed=9)
        side_by_side(*(site.train for site in [*old, new]))
        assert dies.struck
        assert new.reports[0].healed_from == 1
        assert_one_history([old[1], new])

    def test_a_joiner_that_dies_while_it_is_healed_costs_the_others_one_retry(self) -> None:
        network = Network()
        old = Site(network, 0, num_replica_groups=1, total_steps=8)
        old.train(until_round=1)
        new = Site(network, 1, Nth("receive", "crash", nth=3), num_replica_groups=1, total_steps=8, seed=9)
        side_by_side(old.train, new.train)
        assert [report.retries for report in old.reports] == [0, 0, 1, 0, 0]
        assert_one_history([old])
        assert old.replica.seen == list(range(24)), "it lost no inner step"

    def test_a_state_that_arrives_damaged_is_not_used(self, monkeypatch: pytest.MonkeyPatch) -> None:
        network = Network()
        old = Site(network, 0, num_replica_groups=1, total_steps=8)
        old.train(until_round=1)
        new = Site(network, 1, num_replica_groups=1, total_steps=8, seed=9)
        transfer = new.fleet.transfer
        damaged = []

        def damage_once(transfers):  # type: ignore[no-untyped-def]
            handle = transfer(transfers)
            buffer = transfers[0].receive
            if buffer is not None and buffer.dtype == torch.float32 and not damaged:
                damaged.append(buffer[3].item())
                buffer[3] += 1.0
            return handle

        monkeypatch.setattr(new.fleet, "transfer", damage_once)
        side_by_side(old.train, new.train)
        assert damaged
        assert new.reports[0].retries == old.reports[2].retries == 1
        assert_one_history([old, new])


class TestDeaths:
    @pytest.mark.parametrize("kind", ["crash", "crash after", "fail", "fail after"])
    @pytest.mark.parametrize(
        ("verb", "nth"),
        [
            ("meet", 1),
            ("to_owners", 1),
            ("to_owners", 3),
            ("work", 1),
            ("from_owners", 1),
            ("from_owners", 3),
            ("vote", 1),
        ],
    )
    def test_survivors_keep_their_work_and_repeat_the_round(self, verb: str, nth: int, kind: str) -> None:
        """The fault strikes in the first round, which has three buckets to sum."""
        if verb == "meet" and "after" in kind:
            pytest.skip("a meeting has no after")
        network = Network()
        fault = Nth(verb, kind, nth, armed=False)
        common = {"num_replica_groups": 3, "bucket_bytes": 240, "total_steps": 8, "isotropic": "newton_schulz"}
        sites = [Site(network, 0, **common), Site(network, 1, fault, **common), Site(network, 2, **common)]
        side_by_side(*(site.start for site in sites))
        fault.armed = True
        side_by_side(*(site.train for site in sites))
        assert fault.struck
        crashed = "crash" in kind
        left = [sites[0], sites[2]] if crashed else sites
        assert_one_history(left)
        for site in (sites[0], sites[2]):
            assert [report.committed for report in site.reports] == [False, True, True, True, True]
            assert len(site.replica.seen) == 24, "no inner step was lost or repeated"
        counted_once_more = crashed and kind == "crash after" and verb == "vote"
        first = sites[0].reports[1]
        assert first.participants == ([0, 2] if crashed and not counted_once_more else [0, 1, 2])
        assert sites[0].reports[-1].participants == ([0, 2] if crashed else [0, 1, 2])

    def test_the_retried_round_is_the_mean_over_those_who_are_left(self) -> None:
        network = Network()
        common = {"num_replica_groups": 2, "lr": 1.0, "momentum": 0.0, "total_steps": 2}
        survivor, victim = Site(network, 0, **common), Site(network, 1, Nth("to_owners", "crash"), **common)
        side_by_side(survivor.start, victim.start)
        theta = survivor.theta().clone()
        deltas = []

        def until_boundary() -> None:
            for step in range(2):
                loss = survivor.replica.learn([step])
                deltas.append(survivor.delta())
                survivor.reports.append(survivor.outer.after_step([10], [loss]))  # type: ignore[arg-type]

        side_by_side(until_boundary, victim.phase)
        torch.testing.assert_close(survivor.theta(), theta - deltas[-1], rtol=1e-6, atol=1e-6)
        assert survivor.reports[-1].retries == 1
        assert survivor.reports[-1].participants == [0]

    def test_samples_of_a_dead_group_are_trained_on_by_the_others(self) -> None:
        network = Network()
        common = {"num_replica_groups": 2, "total_steps": 8}
        survivor, victim = Site(network, 0, **common), Site(network, 1, Nth("to_owners", "crash", 1), **common)
        side_by_side(survivor.train, victim.train)
        assert set(victim.replica.seen) <= set(survivor.replica.seen)
        assert_one_history([survivor])

    def test_a_group_that_comes_back_at_once_takes_part_again(self) -> None:
        network = Network()
        common = {"num_replica_groups": 2, "total_steps": 12}
        survivor, victim = Site(network, 0, **common), Site(network, 1, Nth("to_owners", "crash", 2), **common)
        again: list[Site] = []

        def crash_and_come_back() -> None:
            with pytest.raises(CrashError):
                victim.train()
            again.append(Site(network, 1, seed=3, **common))
            again[0].train()

        side_by_side(survivor.train, crash_and_come_back)
        assert again[0].reports[0].healed_from == 0
        assert survivor.reports[-1].participants == [0, 1]
        assert_one_history([survivor, again[0]])

    def test_giving_up_after_too_many_failures_names_the_last_one(self) -> None:
        network = Network()

        def dead_line(verb: str) -> str | None:
            return "fail" if verb == "to_owners" else None

        common = {"num_replica_groups": 2, "max_retries": 2}
        sites = [Site(network, 0, **common), Site(network, 1, dead_line, **common)]

        def give_up(site: Site) -> None:
            with pytest.raises(FleetError, match=r"round 1 failed 3 times, the last time: .*line is dead"):
                site.train()

        side_by_side(*(lambda site=site: give_up(site) for site in sites))
        assert sites[0].outer.round == 0


class TestSplits:
    def split(self, num_sites: int, at_vote: int) -> tuple[list[Site], Site]:
        """A run in which the last site hears no answer at a vote that succeeded for the others."""
        network = Network()
        fault = Nth("vote", "fail after", at_vote)
        common = {"num_replica_groups": num_sites, "total_steps": 10}
        sites = [Site(network, replica_id, **common) for replica_id in range(num_sites - 1)]
        sites.append(Site(network, num_sites - 1, fault, **common))
        side_by_side(*(site.train for site in sites))
        assert fault.struck
        return sites[:-1], sites[-1]

    @pytest.mark.parametrize("num_sites", [2, 3])
    def test_the_group_left_behind_is_healed_and_nothing_is_corrupted(self, num_sites: int) -> None:
        others, left_behind = self.split(num_sites, at_vote=3)  # of round 2
        assert_one_history([*others, left_behind])
        healed = next(report for report in left_behind.reports if report.healed_from is not None)
        assert healed.round == 3
        assert [record["round"] for record in healed.missed] == [2]
        assert left_behind.replica_id in healed.missed[0]["participants"], "its work did count in round 2"
        assert healed.weights[left_behind.replica_id] == 0
        assert others[0].reports[-1].weights[left_behind.replica_id] == 1

    def test_a_split_at_the_start_leaves_one_ledger(self) -> None:
        """A meeting without a commit changes nothing but the ledger; who missed its end must not keep an old one."""
        others, left_behind = self.split(2, at_vote=1)
        assert_one_history([*others, left_behind])
        assert left_behind.reports[0].healed_from == 0
        assert left_behind.reports[0].missed == []

    def test_the_winner_s_round_replaces_one_that_only_the_loser_has(self) -> None:
        """Round 2 was committed by each side alone, and one went on: the other's round 2 is no history any more."""
        common = {"num_replica_groups": 1, "total_steps": 12}
        sites = [Site(Network(), replica_id, **common) for replica_id in (0, 1)]
        network = Network()
        together = [Site(network, replica_id, num_replica_groups=2, total_steps=12) for replica_id in (0, 1)]
        side_by_side(*(lambda site=site: site.train(until_round=1) for site in together))
        for site, origin in zip(sites, together, strict=True):
            site.outer.load_state_dict(copy.deepcopy(origin.outer.state_dict()))
            site.outer.history = copy.deepcopy(origin.outer.history)
        sites[0].train(until_round=3)
        sites[1].train(until_round=2)
        assert sites[0].outer.history[1]["digest"] != sites[1].outer.history[1]["digest"]

        reunited = Network()
        for site in sites:
            site.fleet = ThreadFleet(reunited, site.replica_id)
            site.outer.fleet = site.outer._pseudo_gradients.fleet = site.fleet
        side_by_side(sites[0].phase, sites[1].phase)
        assert [record["round"] for record in sites[1].reports[-1].missed] == [2, 3]
        assert_one_history(sites)


class TestDisagreement:
    @staticmethod
    def flip_a_bit(site: Site) -> None:
        site.outer.reference["bias"].view(torch.int32)[0] ^= 1

    def test_a_minority_s_state_is_replaced_by_the_majority_s(self) -> None:
        network = Network()
        sites = [Site(network, replica_id, num_replica_groups=3, total_steps=8) for replica_id in range(3)]
        side_by_side(*(lambda site=site: site.train(until_round=1) for site in sites))
        self.flip_a_bit(sites[1])
        side_by_side(*(site.phase for site in sites))
        assert [site.reports[-1].healed_from for site in sites] == [None, 0, None]
        assert sites[0].reports[-1].participants == [0, 2]
        assert_one_history(sites)
        side_by_side(*(site.train for site in sites))
        assert sites[0].reports[-1].participants == [0, 1, 2]

    def test_without_a_majority_committing_stops_and_both_digests_are_named(self) -> None:
        network = Network()
        sites = [Site(network, replica_id, num_replica_groups=2, total_steps=8) for replica_id in range(2)]
        side_by_side(*(lambda site=site: site.train(until_round=1) for site in sites))
        self.flip_a_bit(sites[1])
        digests = [site.outer.digest() for site in sites]

        def refuse(site: Site) -> None:
            with pytest.raises(HistoryError, match=f"group 0 {digests[0]}, group 1 {digests[1]}"):
                site.phase()

        side_by_side(*(lambda site=site: refuse(site) for site in sites))
        assert [site.outer.round for site in sites] == [1, 1]

    def test_different_initial_parameters_become_one_before_the_first_step(self) -> None:
        network = Network()
        sites = [Site(network, replica_id, seed=replica_id, num_replica_groups=2) for replica_id in range(2)]
        before = sites[0].theta().clone()
        side_by_side(*(site.start for site in sites))
        assert torch.equal(sites[0].theta(), before)
        assert torch.equal(sites[1].theta(), before)
        assert sites[1].reports[0].healed_from == 0
        side_by_side(*(site.train for site in sites))
        assert sites[0].reports[1].participants == [0, 1]

    def test_if_all_diverge_all_stop(self) -> None:
        network = Network()
        sites = [Site(network, replica_id, num_replica_groups=2) for replica_id in range(2)]
        side_by_side(*(site.start for site in sites))

        def diverge(site: Site) -> None:
            with torch.no_grad():
                site.replica.parameters["bias"].fill_(float("nan"))
            with pytest.raises(NonFiniteError):
                site.phase()

        side_by_side(*(lambda site=site: diverge(site) for site in sites))


class TestStrangers:
    def test_a_group_with_another_configuration_leaves_and_the_run_goes_on(self) -> None:
        network = Network()
        home = Site(network, 0, num_replica_groups=1, total_steps=8)
        home.train(until_round=1)
        stranger = Site(network, 1, num_replica_groups=1, total_steps=8, config={"outer.lr": 0.1})

        def leave() -> None:
            with pytest.raises(StrangerError, match=r"group 1 leaves the run: .*outer\.lr: 0\.1 here, 0\.7 there"):
                stranger.train()
            stranger.fleet.close()

        side_by_side(home.train, leave)
        assert home.outer.finished
        assert home.replica.seen == list(range(24))

    def test_the_length_of_the_run_must_be_the_same_too(self) -> None:
        """Else the groups would hand out different numbers of samples, and their ledgers part without a word."""
        network = Network()
        home = Site(network, 0, num_replica_groups=1, total_steps=8)
        other = Site(network, 1, num_replica_groups=1, total_steps=4)
        other.outer._started = home.outer._started + 1

        def leave() -> None:
            with pytest.raises(StrangerError, match="total_steps: 4 here, 8 there"):
                other.train()
            other.fleet.close()

        side_by_side(home.train, leave)
        assert home.outer.finished

    def test_a_second_group_with_the_same_number_leaves(self) -> None:
        network = Network()
        first, second = (Site(network, 0, num_replica_groups=1) for _ in range(2))
        second.outer._started = first.outer._started + 1

        def leave() -> None:
            with pytest.raises(StrangerError, match="replica_id 0 is taken"):
                second.train()
            second.fleet.close()

        side_by_side(first.train, leave)
        assert first.outer.finished

    def test_a_stranger_whose_loss_is_not_a_number_still_knows_itself(self) -> None:
        network = Network()
        home = Site(network, 0, num_replica_groups=1)
        stranger = Site(network, 1, num_replica_groups=1, config={"betas": (0.9, 0.95)})
        stranger.outer._loss_sums = [float("nan")]

        def leave() -> None:
            with pytest.raises(StrangerError):
                stranger.train()
            stranger.fleet.close()

        side_by_side(home.train, leave)


class TestStart:
    def test_b26_a_group_alone_says_whom_it_waits_for(self, caplog: pytest.LogCaptureFixture) -> None:
        network = Network()
        hint = "start it with REPLICA_ID=1"
        first = Site(network, 0, num_replica_groups=2, waiting_hint=hint)
        told = threading.Event()

        def come_when_asked() -> None:
            assert told.wait(30)
            Site(network, 1, num_replica_groups=2).train()

        with caplog.at_level("INFO", logger="isoloco"):
            tell_when_logged(told, "waiting for 1 of 2 replica groups (have [0], missing [1])", hint)
            side_by_side(first.train, come_when_asked)
        assert first.outer.finished
        assert first.reports[0].participants == []
        assert first.reports[1].participants == [0, 1]

    def test_groups_that_are_not_numbered_from_zero_are_not_called_missing(self) -> None:
        network = Network()
        sites = [Site(network, replica_id, num_replica_groups=3) for replica_id in (2, 10)]
        publications = [site.outer._publish([0.0])[0] for site in sites]
        assert sites[0].outer._waiting("too early", publications) == (
            "waiting for 1 of 3 replica groups (have [2, 10]): too early"
        )

    def test_a_running_fleet_waits_for_the_smallest_number_that_may_commit(self) -> None:
        network = Network()
        common = {"num_replica_groups": 2, "min_replica_size": 2, "total_steps": 8}
        survivor, victim = Site(network, 0, **common), Site(network, 1, Nth("to_owners", "crash", 2), **common)
        again: list[Site] = []

        def crash_and_come_back() -> None:
            with pytest.raises(CrashError):
                victim.train()
            again.append(Site(network, 1, seed=3, **common))
            again[0].train()

        side_by_side(survivor.train, crash_and_come_back)
        assert [report.alive for report in survivor.reports] == [2, 2, 2, 2, 2]
        assert_one_history([survivor, again[0]])


class TestResume:
    """Cold starts from checkpoints; a checkpoint is a copy of the state at the end of a round."""

    def run_and_save(self, num_sites: int = 2, num_rounds: int = 3) -> dict[int, dict[int, Any]]:
        """Replica -> round -> its checkpoint, of a run of some rounds."""
        network = Network()
        sites = [Site(network, r, num_replica_groups=num_sites, total_steps=12) for r in range(num_sites)]
        saved: dict[int, dict[int, Any]] = {site.replica_id: {} for site in sites}

        def run(site: Site) -> None:
            site.start()
            for _ in range(num_rounds):
                site.phase()
                saved[site.replica_id][site.outer.round] = copy.deepcopy(
                    (site.outer.state_dict(), site.outer.history, site.replica.own_state())
                )

        side_by_side(*(lambda site=site: run(site) for site in sites))
        return saved

    def resumed(self, network: Network, replica_id: int, checkpoints: dict[int, Any], **settings: Any) -> Site:
        """A site that starts as a trainer does: at its newest checkpoint, and able to go back to older ones."""

        def restore(round_number: int) -> None:
            state, history, own = copy.deepcopy(checkpoints[round_number])
            site.outer.load_state_dict(state)
            site.outer.history = history
            site.replica.load_own_state(own)
            site.restored.append(round_number)  # type: ignore[attr-defined]

        defaults = {"num_replica_groups": 2, "total_steps": 12, "seed": 50 + replica_id}
        site = Site(
            network,
            replica_id,
            restorable_rounds=sorted(checkpoints),
            restore=restore,
            **(defaults | settings),
        )
        site.restored = []  # type: ignore[attr-defined]
        if checkpoints:
            restore(max(checkpoints))
        return site

    def test_all_go_back_to_the_newest_round_that_all_can_restore(self) -> None:
        saved = self.run_and_save()
        del saved[1][3]
        network = Network()
        sites = [self.resumed(network, replica_id, saved[replica_id]) for replica_id in (0, 1)]
        side_by_side(*(site.start for site in sites))
        assert [site.restored for site in sites] == [[3, 2], [2]]  # type: ignore[attr-defined]
        assert [site.reports[0].retries for site in sites] == [0, 0], "no exchange may be tried with one on its way"
        assert [site.reports[0].healed_from for site in sites] == [None, None]
        side_by_side(*(site.train for site in sites))
        assert_one_history(sites)

    def test_a_round_that_was_given_up_is_never_restored(self) -> None:
        """Its checkpoint is set aside. The group that could not restore it dies, and comes back with none at all."""
        saved = self.run_and_save()
        del saved[1][3]
        network = Network()
        sites = [self.resumed(network, replica_id, saved[replica_id]) for replica_id in (0, 1)]
        sites[1].fleet.fault = Nth("meet", "crash", 2)

        def crash_and_come_back() -> None:
            with pytest.raises(CrashError):
                sites[1].start()
            sites[1] = self.resumed(network, 1, {})
            sites[1].start()

        side_by_side(sites[0].start, crash_and_come_back)
        assert sites[0].restored == [3, 2]  # type: ignore[attr-defined]
        assert sites[1].reports[0].healed_from == 0
        assert_one_history(sites)

    def test_resumed_equals_never_stopped(self) -> None:
        saved = self.run_and_save(num_rounds=6)
        whole = {replica_id: saved[replica_id][6] for replica_id in (0, 1)}
        for checkpoints in saved.values():
            for round_number in (4, 5, 6):
                del checkpoints[round_number]
        network = Network()
        sites = [self.resumed(network, replica_id, saved[replica_id]) for replica_id in (0, 1)]
        side_by_side(*(site.train for site in sites))
        for site in sites:
            state, history, _ = whole[site.replica_id]
            assert site.outer.state_dict()["record"] == state["record"]
            assert site.outer.history == history
            for name, tensor in site.outer.state_dict()["tensors"].items():
                assert torch.equal(tensor, state["tensors"][name])

    def test_a_group_without_checkpoint_is_healed_by_one_that_has_it(self) -> None:
        saved = self.run_and_save()
        network = Network()
        sites = [self.resumed(network, 0, saved[0]), self.resumed(network, 1, {})]
        side_by_side(*(site.train for site in sites))
        assert sites[1].reports[0].healed_from == 0
        assert [record["round"] for record in sites[1].reports[0].missed] == [1, 2, 3]
        assert_one_history(sites)

    def test_after_its_patience_a_group_goes_on_alone_and_a_late_one_joins_with_one_ledger(self) -> None:
        """The late one holds the same round and digest, but a ledger from before the first one went on alone."""
        saved = self.run_and_save()
        network = Network()
        early = self.resumed(network, 0, saved[0], start_wait_seconds=0.0)
        early.start()
        late = self.resumed(network, 1, saved[1])
        assert late.outer.digest() == early.outer.digest()
        side_by_side(early.train, late.train)
        assert_one_history([early, late])

    def test_lost_files_are_not_started_over(self) -> None:
        network = Network()
        sites = [self.resumed(network, 0, {}), self.resumed(network, 1, {}, lost=True)]

        def refuse(site: Site) -> None:
            with pytest.raises(HistoryError, match="--fresh"):
                site.start()

        side_by_side(*(lambda site=site: refuse(site) for site in sites))


class Chaos:
    """Faults of all kinds at random times, the same ones for the same seed of the same replica."""

    KINDS = ("fail", "fail after", "crash", "crash after")

    def __init__(self, seed: int, rate: float) -> None:
        self.random = random.Random(seed)
        self.rate = rate
        self.armed = True

    def __call__(self, verb: str) -> str | None:
        if not self.armed or self.random.random() > self.rate:
            return None
        kind = self.random.choice(self.KINDS)
        return "fail" if verb == "meet" and kind == "fail after" else kind


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), rate=st.sampled_from([0.01, 0.03, 0.1]))
def test_whatever_happens_to_two_of_three_groups_the_run_has_one_history(seed: int, rate: float) -> None:
    """Group 0 lives; the others crash and come back, fail and lose votes. In the end all agree on everything."""
    common = {"num_replica_groups": 3, "total_steps": 16, "bucket_bytes": 240, "max_retries": 1000}
    network = Network()
    steady = Site(network, 0, **common)
    last: dict[int, Site] = {0: steady}
    first = {replica_id: Site(network, replica_id, **common) for replica_id in (1, 2)}
    done = threading.Event()

    def unsteady(replica_id: int) -> None:
        checkpoint: tuple[Any, ...] | None = None
        for life in range(1000):
            site = first.pop(replica_id, None) or Site(network, replica_id, seed=life, **common)
            chaos = Chaos(seed * 10 + replica_id + 1000 * life, rate)
            site.fleet.fault = chaos
            last[replica_id] = site
            if checkpoint is not None and chaos.random.random() < 0.5:
                state, history = copy.deepcopy(checkpoint)
                site.outer.load_state_dict(state)
                site.outer.history = history
            try:
                site.start()
                while not site.outer.finished:
                    if chaos.random.random() < 0.5:
                        checkpoint = copy.deepcopy((site.outer.state_dict(), site.outer.history))
                    chaos.armed = site.outer.step < 12  # the last two rounds are quiet, so that all can be there
                    site.phase()
                return
            except CrashError:
                if done.is_set():
                    return

    def be_steady() -> None:
        steady.train()
        done.set()
        steady.fleet.close()

    with mock.patch("isoloco.outer_round.PAUSE_SECONDS", 0.001):
        side_by_side(be_steady, lambda: unsteady(1), lambda: unsteady(2))
    assert_one_history([steady])
    for site in last.values():
        known = {record["round"]: record for record in steady.outer.history}
        assert all(known[record["round"]] == record for record in site.outer.history)
        if site.outer.round == steady.outer.round:
            assert_one_history([steady, site])


def momentum(site: Site) -> torch.Tensor:
    optimizer = site.outer.optimizer
    buffers = [optimizer.state[theta]["momentum_buffer"] for theta in site.outer.reference.values()]
    return torch.cat([buffer.flatten() for buffer in buffers]).clone()


def tell_when_logged(event: threading.Event, *texts: str) -> None:
    """Set the event once the project's log has a line with all the texts."""
    import logging

    class Watch(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if all(text in record.getMessage() for text in texts):
                event.set()

    logging.getLogger("isoloco").addHandler(Watch())
