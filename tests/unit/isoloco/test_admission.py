"""Who takes part in a round, decided from what the members published alone."""

from dataclasses import replace
from typing import Any

import pytest

from isoloco.admission import (
    HistoryError,
    Publication,
    differences,
    home,
    reason_to_wait,
    round_to_restore,
    sort_out,
    strangers,
)

CONFIG = {"outer.lr": 1.8, "outer.sync_steps": 15}


def newcomer(replica_id: int, **changes: Any) -> Publication:
    """What a group publishes that has just started and has no history."""
    fresh = Publication(
        replica_id=replica_id,
        started=1000.0 + replica_id,
        run_id="",
        config=CONFIG,
        round=0,
        step=0,
        digest="initial",
        ledger="000-initial",
        cold=True,
        patient=True,
        lost=False,
        restorable_rounds=[],
        weight=0.0,
        rejected=False,
        num_tokens=0,
        loss_sum=0.0,
    )
    return replace(fresh, **changes)


def running(replica_id: int, round_number: int = 4, **changes: Any) -> Publication:
    """What a group publishes that takes part in a run."""
    state: dict[str, Any] = {
        "run_id": "run",
        "round": round_number,
        "step": 15 * round_number,
        "digest": f"digest of {round_number}",
        "ledger": f"00{round_number}-ledger",
        "cold": False,
        "weight": 1.0,
        "num_tokens": 100,
    }
    return newcomer(replica_id, **(state | changes))


def resumed(replica_id: int, rounds: list[int], **changes: Any) -> Publication:
    """What a group publishes that has just loaded the newest of its checkpoints."""
    state: dict[str, Any] = {"cold": True, "weight": 0.0, "num_tokens": 0, "restorable_rounds": rounds}
    return running(replica_id, rounds[-1], **(state | changes))


class TestStrangers:
    def test_a_group_of_another_configuration_leaves_with_the_difference(self) -> None:
        other = newcomer(1, config=CONFIG | {"outer.lr": 0.7})
        assert strangers([running(0), other]) == {
            1: "its configuration differs: outer.lr: 0.7 here, 1.8 there",
        }

    def test_a_key_that_only_one_side_has_is_a_difference(self) -> None:
        assert differences({"a": 1, "b": 2}, {"a": 1, "c": 3}) == "b: 2 here, absent there; c: absent here, 3 there"

    def test_a_group_of_another_run_leaves(self) -> None:
        reasons = strangers([running(0), running(1, run_id="elsewhere", started=2000.0)])
        assert reasons == {1: "it belongs to run elsewhere, the others to run run"}

    def test_a_group_without_history_belongs_to_any_run(self) -> None:
        assert strangers([running(0), newcomer(1)]) == {}

    def test_of_two_groups_with_one_number_the_later_one_leaves(self) -> None:
        reasons = strangers([newcomer(0, started=2.0), newcomer(0, started=1.0), newcomer(1, started=3.0)])
        assert list(reasons) == [0]
        assert "replica_id 0 is taken" in reasons[0]

    def test_a_stranger_does_not_take_a_number(self) -> None:
        stranger = running(1, round_number=3, config={})
        assert list(strangers([running(0, 4), stranger, running(1, 2)])) == [1]

    def test_a_newcomer_with_more_rounds_does_not_drive_a_living_run_apart(self) -> None:
        old_run = resumed(2, [100], run_id="old", started=1.0)
        assert list(strangers([running(0, 4), running(1, 4), old_run])) == [2]
        assert home([old_run, running(0, 4)]).replica_id == 0

    def test_a_run_without_a_commit_yet_is_a_run(self) -> None:
        old_run = resumed(2, [100], run_id="old", started=1.0)
        assert list(strangers([running(0, 0), running(1, 0), old_run])) == [2]

    def test_at_a_cold_start_the_run_with_most_rounds_is_at_home(self) -> None:
        assert list(strangers([resumed(0, [3], run_id="short"), resumed(1, [5], run_id="long")])) == [0]


class TestReasonToWait:
    def test_groups_without_history_start_only_together(self) -> None:
        assert reason_to_wait([newcomer(0)], 2, 1) == "the run starts when all groups are there"
        assert reason_to_wait([newcomer(0, patient=False)], 2, 1) is not None
        assert reason_to_wait([newcomer(0), newcomer(1)], 2, 1) is None

    def test_a_start_from_checkpoints_waits_while_all_are_patient(self) -> None:
        members = [resumed(0, [2]), resumed(1, [2])]
        assert reason_to_wait(members, 3, 1) is not None
        assert reason_to_wait([members[0], replace(members[1], patient=False)], 3, 1) is None

    def test_a_group_without_checkpoint_does_not_hold_up_an_impatient_one_with_history(self) -> None:
        assert reason_to_wait([resumed(0, [2], patient=False), newcomer(1)], 3, 1) is None

    def test_a_running_fleet_takes_newcomers_at_once(self) -> None:
        assert reason_to_wait([running(0), newcomer(1)], 3, 1) is None

    def test_a_running_fleet_waits_below_its_minimum_which_counts_newcomers(self) -> None:
        assert reason_to_wait([running(0)], 3, 2) == "at least 2 groups must be there to commit"
        assert reason_to_wait([running(0), newcomer(1)], 3, 2) is None

    def test_a_lost_history_is_not_silently_started_over(self) -> None:
        with pytest.raises(HistoryError, match=r"group 1 tell of committed rounds.*--fresh"):
            reason_to_wait([newcomer(0), newcomer(1, lost=True)], 2, 1)

    def test_a_lost_history_is_waited_for_while_a_group_is_missing_that_may_hold_it(self) -> None:
        assert reason_to_wait([newcomer(1, lost=True)], 2, 1) is not None

    def test_a_group_that_lost_its_history_joins_one_that_has_it(self) -> None:
        assert reason_to_wait([running(0), newcomer(1, lost=True)], 2, 1) is None
        assert reason_to_wait([resumed(0, [2]), newcomer(1, lost=True)], 2, 1) is None


class TestRoundToRestore:
    def test_all_go_back_to_the_newest_common_round(self) -> None:
        assert round_to_restore([resumed(0, [1, 2, 3]), resumed(1, [1, 2])]) == 2

    def test_nobody_goes_back_once_all_are_there(self) -> None:
        there = resumed(0, [1, 2, 3], round=2)
        assert round_to_restore([there, resumed(1, [1, 2])]) is None

    def test_all_members_of_a_meeting_hear_that_one_goes_back(self) -> None:
        # the decision is about the meeting, not about this group: who is there already must not start without it
        members = [resumed(0, [1, 2, 3]), resumed(1, [1, 2]), newcomer(2)]
        assert round_to_restore(members) == round_to_restore(members[::-1]) == 2

    def test_a_group_without_checkpoints_has_no_say(self) -> None:
        assert round_to_restore([resumed(0, [2, 3]), newcomer(1)]) is None
        assert round_to_restore([newcomer(0), newcomer(1)]) is None

    def test_without_a_common_round_nobody_goes_back(self) -> None:
        assert round_to_restore([resumed(0, [5, 6]), resumed(1, [2, 3])]) is None

    def test_a_running_fleet_never_goes_back(self) -> None:
        assert round_to_restore([running(0, restorable_rounds=[2]), resumed(1, [2, 3])]) is None


class TestSortOut:
    def test_the_highest_round_wins(self) -> None:
        assert sort_out([running(0, 3), running(1, 4), newcomer(2)]) == ([1], [0, 2])

    def test_equal_members_are_all_current(self) -> None:
        assert sort_out([running(0), running(1)]) == ([0, 1], [])

    def test_the_majority_digest_wins(self) -> None:
        members = [running(0), running(1, digest="corrupt"), running(2)]
        assert sort_out(members) == ([0, 2], [1])

    def test_only_members_of_the_highest_round_are_counted(self) -> None:
        members = [running(0, 3), running(1, 3), running(2, 4)]
        assert sort_out(members) == ([2], [0, 1])

    def test_a_tie_names_both_digests(self) -> None:
        with pytest.raises(HistoryError, match=r"round 4 .*group 0 digest of 4, group 1 corrupt"):
            sort_out([running(0), running(1, digest="corrupt")])

    def test_three_different_digests_have_no_majority(self) -> None:
        with pytest.raises(HistoryError):
            sort_out([running(0), running(1, digest="a"), running(2, digest="b")])

    def test_before_the_first_commit_the_lowest_number_s_parameters_win(self) -> None:
        assert sort_out([newcomer(0), newcomer(1, digest="other seed")]) == ([0], [1])

    def test_before_the_first_commit_a_newcomer_does_not_overrule_who_trains_already(self) -> None:
        trains = running(1, 0, digest="in use")
        assert sort_out([newcomer(0, digest="other seed"), trains]) == ([1], [0])

    def test_who_missed_a_meeting_without_a_commit_is_behind(self) -> None:
        # same parameters, but samples were handed out meanwhile: its ledger would diverge from the others'
        members = [running(0, ledger="009-new"), running(1, ledger="004-old"), running(2, ledger="009-new")]
        assert sort_out(members) == ([0, 2], [1])

    def test_the_newest_ledger_wins_even_in_the_minority(self) -> None:
        members = [resumed(0, [4]), resumed(1, [4]), running(2, ledger="009-new")]
        assert sort_out(members) == ([2], [0, 1])

    def test_a_corrupt_state_does_not_win_by_its_ledger(self) -> None:
        members = [running(0), running(1, digest="corrupt", ledger="999-new"), running(2)]
        assert sort_out(members) == ([0, 2], [1])
