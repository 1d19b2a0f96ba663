"""Groups that die, come late, disagree or do not belong, among real processes with a real lighthouse."""

import signal
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torchft.coordination import LighthouseServer

from isoloco.fleet import VirtualFleet
from tests.distributed.training_groups import (
    correct_when_told,
    count_tensors,
    flip_a_bit,
    hear_no_answer_at_second_round_s_vote,
    make_drifting_round,
    meet_again_after_a_failed_quorum,
    register_and_be_silent,
    stop_in_second_round_s_exchange,
    tell_every_question,
    train_sharded,
    train_toy,
    two_layers,
    wait_to_be_interrupted,
)
from tests.distributed.training_groups import drift as drifting_round
from tests.run_groups import Group, Groups, running_groups
from tests.training_run import wait_until

pytestmark = pytest.mark.slow

HEARTBEAT_TIMEOUT = 1.5
TOY = {"lr": 0.7, "momentum": 0.9, "total_steps": 1000, "bucket_bytes": 40}  # without a matrix's correction


class Lighthouse:
    def __init__(self) -> None:
        self._server = self._serve(0)
        self.port = int(self._server.address().rpartition(":")[2])
        self.address = f"http://127.0.0.1:{self.port}"

    @staticmethod
    def _serve(port: int) -> LighthouseServer:
        return LighthouseServer(
            bind=f"[::]:{port}",
            min_replicas=1,
            join_timeout_ms=60_000,
            quorum_tick_ms=10,
            heartbeat_timeout_ms=int(1000 * HEARTBEAT_TIMEOUT),
        )

    def restart(self) -> None:
        self.stop()
        self._server = wait_until(self._serve_if_free, "the old one lets go of its port", seconds=30)

    def _serve_if_free(self) -> LighthouseServer | None:
        try:
            return self._serve(self.port)
        except RuntimeError as error:
            if "Address already in use" not in str(error):
                raise
            return None

    def stop(self) -> None:
        self._server.shutdown()


@pytest.fixture
def lighthouse() -> Iterator[Lighthouse]:
    server = Lighthouse()
    yield server
    server.stop()


@pytest.fixture
def groups() -> Iterator[Groups]:
    with running_groups() as started:
        yield started


def start_together(
    groups: Groups,
    lighthouse: Lighthouse,
    count: int,
    faults: Mapping[int, Any] | None = None,
    more: Mapping[str, Any] | None = None,
) -> list[Group]:
    """Toy groups 0, 1, ... after their first meeting."""
    settings = TOY | {"num_replica_groups": count} | dict(more or {})
    started = [
        groups.start(replica_id, train_toy, lighthouse.address, settings, (faults or {}).get(replica_id))
        for replica_id in range(count)
    ]
    for group in started:
        group.expect("meeting")
    return started


def next_round(*started: Group, command: Any = None) -> list[dict[str, Any]]:
    """Let groups train to their next meeting; what each tells of it."""
    for group in started:
        group.say(command)
    return [group.expect("meeting") for group in started]


def rounds_until(home: Group, newcomer: Group, event: str) -> dict[str, Any]:
    """Let a group train until one that has just been started has met it, or has told this event; its last meeting."""
    newcomer.expect("about to meet")
    while True:
        (meeting,) = next_round(home)
        if meeting["report"].alive > 1 or newcomer.has_told(event):
            return meeting


def assert_equal_states(*meetings: Mapping[str, Any]) -> None:
    first = meetings[0]["state"]
    for meeting in meetings[1:]:
        for key, value in meeting["state"].items():
            same = torch.equal(value, first[key]) if isinstance(value, torch.Tensor) else value == first[key]
            assert same, key


def expected_step(before: Mapping[str, Any], *drifts: torch.Tensor) -> torch.Tensor:
    """θ after a Nesterov step with the mean of these pseudo-gradients."""
    mean = torch.stack(drifts).mean(dim=0)
    return before["theta"] - 0.7 * (mean + 0.9 * (0.9 * before["momentum"] + mean))


def test_a_peer_killed_in_the_exchange_costs_the_survivor_nothing_and_its_successor_is_healed(
    groups: Groups, lighthouse: Lighthouse
) -> None:
    """B21 and B23 on real processes: kill -9, the same Δ again, a joiner without weight, then the exact mean."""
    survivor, victim = start_together(groups, lighthouse, 2, {1: stop_in_second_round_s_exchange})
    first, other = next_round(survivor, victim)
    assert_equal_states(first, other)
    survivor.say()
    victim.say()
    victim.expect("exchanging")
    killed_at = time.monotonic()
    victim.kill()
    second = survivor.expect("meeting")
    assert time.monotonic() - killed_at < 15, "found by its dead socket and heartbeat, not by the 20 s of a transfer"
    report = second["report"]
    assert (report.participants, report.alive, report.registered) == ([0], 1, 2)
    assert report.retries >= 1
    torch.testing.assert_close(second["state"]["theta"], expected_step(first["state"], second["drift"]))
    assert len(second["seen"]) == 12, "two rounds of two steps of three samples: none was lost or repeated"

    successor = groups.start(1, train_toy, lighthouse.address, TOY | {"num_replica_groups": 2, "seed": 7})
    third = rounds_until(survivor, successor, "meeting")
    healed = successor.expect("meeting")
    assert healed["report"].healed_from == 0
    assert healed["report"].weights == third["report"].weights == {0: 1.0, 1: 0.0}
    assert [record["round"] for record in healed["report"].missed] == list(range(1, third["state"]["round"]))
    assert_equal_states(third, healed)

    fourth, healed_fourth = next_round(survivor, successor)
    assert fourth["report"].participants == [0, 1]
    assert not torch.allclose(fourth["drift"], healed_fourth["drift"])
    expected = expected_step(third["state"], fourth["drift"], healed_fourth["drift"])
    torch.testing.assert_close(fourth["state"]["theta"], expected)
    assert_equal_states(fourth, healed_fourth)


def test_a_peer_that_stands_still_is_left_out_and_healed_when_it_moves_again(
    groups: Groups, lighthouse: Lighthouse
) -> None:
    """SIGSTOP in the exchange: its sockets are open, so only the time limit of a transfer tells."""
    quick = {"fleet": {"timeout_seconds": 3.0}}
    survivor, victim = start_together(groups, lighthouse, 2, {1: stop_in_second_round_s_exchange}, quick)
    next_round(survivor, victim)
    survivor.say()
    victim.say()
    victim.expect("exchanging")
    victim.signal(signal.SIGSTOP)
    second = survivor.expect("meeting")
    assert second["report"].participants == [0]
    assert len(second["seen"]) == 12
    victim.signal(signal.SIGCONT)
    victim.say()  # it goes on with an exchange that is over
    third = rounds_until(survivor, victim, "meeting")
    healed = victim.expect("meeting")
    assert healed["report"].healed_from == 0
    assert healed["report"].weights[1] == 0
    assert_equal_states(third, healed)
    assert next_round(survivor, victim)[0]["report"].participants == [0, 1]


def test_a_group_that_hears_no_answer_at_the_vote_is_healed_at_the_next_meeting(
    groups: Groups, lighthouse: Lighthouse
) -> None:
    """torchft's vote is not atomic: one group commits round 2, the other does not and must not go another way."""
    ahead, behind = start_together(groups, lighthouse, 2, {1: hear_no_answer_at_second_round_s_vote})
    assert_equal_states(*next_round(ahead, behind))
    ahead.say()
    behind.say()
    second = ahead.expect("meeting")
    assert second["report"].participants == [0, 1]
    ahead.say()  # it trains on, while the other one waits for it with its round 2
    third, healed = ahead.expect("meeting"), behind.expect("meeting")
    assert third["report"].weights == healed["report"].weights == {0: 1.0, 1: 0.0}
    assert healed["report"].healed_from == 0
    assert [record["round"] for record in healed["report"].missed] == [2]
    assert_equal_states(third, healed)
    fourth, other = next_round(ahead, behind)
    assert fourth["report"].participants == [0, 1]
    assert_equal_states(fourth, other)


def test_the_state_of_a_minority_is_replaced(groups: Groups, lighthouse: Lighthouse) -> None:
    started = start_together(groups, lighthouse, 3)
    next_round(*started)
    for index, group in enumerate(started):
        group.say(flip_a_bit if index == 1 else None)
    meetings = [group.expect("meeting") for group in started]
    assert [meeting["report"].healed_from for meeting in meetings] == [None, 0, None]
    assert meetings[0]["report"].participants == [0, 2]
    assert_equal_states(*meetings)
    assert next_round(*started)[1]["report"].participants == [0, 1, 2]


def test_strangers_leave_before_any_tensor_moves(groups: Groups, lighthouse: Lighthouse) -> None:
    """One with another configuration and another model, and one whose number is taken."""
    home = groups.start(0, train_toy, lighthouse.address, TOY | {"num_replica_groups": 1}, count_tensors)
    home.expect("meeting")
    for replica_id, more, reason in (
        (1, {"config": {"outer.lr": 0.1}}, "outer.lr: 0.1 here, 0.7 there"),
        (0, {}, "replica_id 0 is taken by a living group"),
    ):
        stranger = groups.start(
            replica_id, train_toy, lighthouse.address, TOY | {"num_replica_groups": 1} | more, count_tensors
        )
        meeting = rounds_until(home, stranger, "raised")
        events = stranger.events_until("raised")
        assert "tensor" not in [event for event, _ in events]
        error = events[-1][1]
        assert "StrangerError" in error
        assert reason in error
        assert meeting["report"].alive == 1
    (meeting,) = next_round(home)
    assert meeting["report"].committed


def test_b26_a_group_alone_says_so_until_the_second_comes(groups: Groups, lighthouse: Lighthouse) -> None:
    settings = TOY | {"num_replica_groups": 2, "waiting_hint": "start it with REPLICA_ID=1"}
    first = groups.start(0, train_toy, lighthouse.address, settings)
    text = first.expect("log")
    assert text == (
        "waiting for 1 of 2 replica groups (have [0], missing [1]): the run starts when all groups are there; "
        "start it with REPLICA_ID=1"
    )
    second = groups.start(1, train_toy, lighthouse.address, settings)
    meetings = [first.expect("meeting"), second.expect("meeting")]
    assert [meeting["report"].alive for meeting in meetings] == [2, 2]
    assert_equal_states(*meetings)
    assert next_round(first, second)[0]["report"].participants == [0, 1]


def test_groups_of_two_sharded_ranks_equal_a_simulation_though_single_ranks_fail(
    groups: Groups, lighthouse: Lighthouse
) -> None:
    """FSDP2, rows that do not divide; on rank 1 of group 1, and on no other, one verb fails in each of four rounds."""
    failing = {2: "_all_to_all", 3: "_gather_json", 4: "_all_gather", 5: "after the exchange"}
    started = [
        groups.start(replica_id, train_sharded, lighthouse.address, failing if replica_id == 1 else {}, num_ranks=2)
        for replica_id in (0, 1)
    ]
    results = [group.result() for group in started]
    replicas = [dict(two_layers().named_parameters()) for _ in range(2)]
    simulation = make_drifting_round(VirtualFleet([0, 1]), replicas)  # type: ignore[arg-type]
    simulation.start()
    reports = [drifting_round(simulation) for _ in range(5)]
    for replica_id, result in enumerate(results):
        assert result["digest"] == simulation.digest()
        assert result["participants"] == [[0, 1]] * 5
        assert result["retries"] == [0, 1, 1, 1, 1]
        for name, parameter in replicas[replica_id].items():
            assert torch.equal(result["whole"][name], parameter.detach())
        for norms, cosines, report in zip(result["norms"], result["cosines"], reports, strict=True):
            assert norms[replica_id] == pytest.approx(report.pseudo_gradient_norm[replica_id])
            assert cosines[replica_id] == pytest.approx(report.cosine[replica_id])


def test_a_group_of_another_size_is_told_so(groups: Groups, lighthouse: Lighthouse) -> None:
    """Its rank 1 has nobody to talk to; the reason must come from rank 0 all the same."""
    home = groups.start(0, train_toy, lighthouse.address, TOY | {"num_replica_groups": 1})
    home.expect("meeting")
    other = groups.start(
        1,
        train_toy,
        lighthouse.address,
        TOY | {"num_replica_groups": 1, "fleet": {"timeout_seconds": 3.0}},
        num_ranks=2,
    )
    assert rounds_until(home, other, "raised")["report"].alive == 1
    assert "ranks of a group: 2 here, 1 there" in other.events_until("raised")[-1][1]


def test_after_a_failed_quorum_call_all_ranks_find_the_new_manager(groups: Groups, lighthouse: Lighthouse) -> None:
    group = groups.start(5, meet_again_after_a_failed_quorum, lighthouse.address, num_ranks=2)
    for message, replaced, num_members, total, vote in group.expect_all("returned"):
        assert message.startswith(f"no quorum at {lighthouse.address}: ")
        assert replaced
        assert (num_members, total, vote) == (1, [1.0, 1.0, 1.0], True)


def test_waiting_for_others_ends_at_once_on_sigterm(groups: Groups, lighthouse: Lighthouse) -> None:
    silent = groups.start(0, register_and_be_silent, lighthouse.address)
    silent.expect("connected")
    waiting = groups.start(1, wait_to_be_interrupted, lighthouse.address)
    waiting.expect("waiting")
    started = time.monotonic()
    waiting.signal(signal.SIGTERM)
    assert "in meet" in waiting.result()
    assert time.monotonic() - started < 3.0


@pytest.mark.parametrize("when", ["between meetings", "while a group waits"])
def test_a_lighthouse_that_is_restarted_costs_no_round(groups: Groups, lighthouse: Lighthouse, when: str) -> None:
    started = start_together(groups, lighthouse, 2)
    next_round(*started)
    if when == "between meetings":
        lighthouse.restart()
        meetings = next_round(*started)
    else:
        started[0].say()
        started[0].expect("about to meet")
        lighthouse.restart()
        started[1].say()
        meetings = [group.expect("meeting") for group in started]
    assert meetings[0]["report"].participants == [0, 1]
    assert_equal_states(*meetings)
    assert next_round(*started)[0]["report"].participants == [0, 1]


def test_a_correction_may_take_longer_than_a_transfer(groups: Groups, lighthouse: Lighthouse) -> None:
    """The others ask whether it is done, each time for a moment; and the round is not repeated."""
    settings = TOY | {"isotropic": "svd", "num_replica_groups": 2, "fleet": {"timeout_seconds": 2.0}}
    slow = groups.start(0, train_toy, lighthouse.address, settings, correct_when_told)
    other = groups.start(1, train_toy, lighthouse.address, settings, tell_every_question)
    for group in (slow, other):
        group.expect("meeting")
        group.say()
    for group in (slow, other):
        group.expect("meeting")  # after round 1
        group.say()
    slow.expect("correcting")
    for _ in range(60):  # at most ten a second: three times as long as a transfer may take
        other.expect("question")
    slow.say()
    reports = [group.expect("meeting")["report"] for group in (slow, other)]
    assert [report.round for report in reports] == [2, 2]
    assert [report.retries for report in reports] == [0, 0]
    assert reports[0].digest == reports[1].digest
