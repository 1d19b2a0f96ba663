"""The ledger hands out every sample to one group at a time, records who consumed it, and loses none."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isoloco.ledger import Ledger

SAMPLES_PER_EPOCH = 17  # odd and small, so that grants cross epochs often

Meeting = dict[int, tuple[int, bool]]
"""What one meeting finds: replica id -> (how many samples its next phase needs, whether its work counts)."""
MEETINGS = st.lists(
    st.dictionaries(st.integers(0, 4), st.tuples(st.integers(0, 30), st.booleans()), min_size=1),
    max_size=12,
)


def flat(intervals: Iterable[Sequence[int]]) -> list[int]:
    return [sample for start, stop in intervals for sample in range(start, stop)]


def row_samples(rows: list[dict[str, Any]]) -> list[int]:
    """Global sample indices of ledger rows."""
    return [row["epoch"] * SAMPLES_PER_EPOCH + sample for row in rows for sample in flat(row["samples"])]


def hold(ledger: Ledger, meetings: list[Meeting]) -> list[dict[str, Any]]:
    """Hold meetings; members come, die and stay away as the dictionaries say. Returns all rows."""
    rows = []
    for round_number, meeting in enumerate(meetings, start=1):
        counting = [replica for replica, (_, counts) in meeting.items() if counts and replica in ledger.grants]
        rows += ledger.commit(round_number, counting)
        ledger.grant({replica: wanted for replica, (wanted, _) in meeting.items()})
    return rows


@settings(deadline=None)
@given(MEETINGS)
def test_every_sample_below_the_cursor_is_committed_granted_or_returned_and_only_one_of_them(
    meetings: list[Meeting],
) -> None:
    ledger = Ledger(SAMPLES_PER_EPOCH)
    committed = row_samples(hold(ledger, meetings))
    granted = [sample for grant in ledger.grants.values() for sample in flat(grant)]
    assert sorted(committed + granted + flat(ledger.returned)) == list(range(ledger.cursor))


@settings(deadline=None)
@given(MEETINGS)
def test_a_member_gets_exactly_what_its_phase_needs_and_nobody_else_holds_a_grant(meetings: list[Meeting]) -> None:
    ledger = Ledger(SAMPLES_PER_EPOCH)
    for count, meeting in enumerate(meetings, start=1):
        hold(ledger, meetings[count - 1 : count])
        assert {replica: len(flat(grant)) for replica, grant in ledger.grants.items()} == {
            replica: wanted for replica, (wanted, _) in meeting.items()
        }


@settings(deadline=None)
@given(MEETINGS)
def test_rows_stay_inside_their_epoch_and_there_is_one_per_epoch_and_replica(meetings: list[Meeting]) -> None:
    rows = hold(Ledger(SAMPLES_PER_EPOCH), meetings)
    for row in rows:
        assert row["samples"]
        assert all(0 <= start < stop <= SAMPLES_PER_EPOCH for start, stop in row["samples"])
    keys = [(row["round"], row["replica"], row["epoch"]) for row in rows]
    assert len(keys) == len(set(keys))


@settings(deadline=None)
@given(MEETINGS, MEETINGS)
def test_a_ledger_goes_through_json_and_goes_on_as_before(before: list[Meeting], after: list[Meeting]) -> None:
    ledger, restored = Ledger(SAMPLES_PER_EPOCH), Ledger(SAMPLES_PER_EPOCH)
    hold(ledger, before)
    restored.load_state_dict(json.loads(json.dumps(ledger.state_dict())))
    assert restored == ledger
    assert hold(restored, after) == hold(ledger, after)
    assert restored == ledger
    assert restored.fingerprint() == ledger.fingerprint()


@settings(deadline=None)
@given(MEETINGS)
def test_equal_ledgers_stay_equal_in_whatever_order_members_and_participants_are_named(meetings: list[Meeting]) -> None:
    one, other = Ledger(SAMPLES_PER_EPOCH), Ledger(SAMPLES_PER_EPOCH)
    assert hold(one, meetings) == hold(other, [dict(reversed(meeting.items())) for meeting in meetings])
    assert one.fingerprint() == other.fingerprint()


def test_a_run_of_samples_is_contiguous_while_nobody_dies() -> None:
    ledger = Ledger(100)
    ledger.grant({0: 6, 1: 6})
    assert ledger.grants == {0: [(0, 6)], 1: [(6, 12)]}
    ledger.commit(1, [0, 1])
    ledger.grant({0: 6, 1: 6})
    assert ledger.grants == {0: [(12, 18)], 1: [(18, 24)]}


def test_what_a_dead_group_did_not_commit_goes_out_again_first() -> None:
    ledger = Ledger(100)
    ledger.grant({0: 6, 1: 6})
    ledger.commit(1, [0])
    ledger.grant({0: 8})
    assert ledger.grants == {0: [(6, 14)]}
    assert ledger.returned == []


def test_a_member_whose_work_was_rejected_keeps_its_samples() -> None:
    ledger = Ledger(100)
    ledger.grant({0: 6, 1: 6})
    ledger.commit(1, [1])
    ledger.grant({0: 6, 1: 6})
    assert ledger.grants == {0: [(0, 6)], 1: [(12, 18)]}


def test_a_shorter_last_phase_takes_back_what_it_does_not_need() -> None:
    ledger = Ledger(100)
    ledger.grant({0: 6, 1: 6})
    ledger.commit(1, [1])
    ledger.grant({0: 2, 1: 3})
    assert ledger.grants == {0: [(0, 2)], 1: [(2, 5)]}
    assert ledger.returned == [(5, 6)]


def test_a_round_that_crosses_epochs_has_a_row_per_epoch() -> None:
    ledger = Ledger(10)
    ledger.grant({3: 24})
    assert ledger.commit(7, [3]) == [
        {"round": 7, "epoch": 0, "replica": 3, "samples": [[0, 10]]},
        {"round": 7, "epoch": 1, "replica": 3, "samples": [[0, 10]]},
        {"round": 7, "epoch": 2, "replica": 3, "samples": [[0, 4]]},
    ]


def test_of_two_ledgers_of_a_run_the_newer_has_the_higher_fingerprint() -> None:
    ledger = Ledger(10)
    older = ledger.fingerprint()
    for count in range(12):  # past a change of the number of digits
        ledger.grant({0: 3 + count})
        assert ledger.fingerprint() > older
        older = ledger.fingerprint()


def test_a_meeting_that_grants_what_was_granted_leaves_the_ledger_as_it_was() -> None:
    ledger = Ledger(10)
    ledger.grant({0: 3, 1: 3})
    before = ledger.fingerprint()
    ledger.grant({1: 3, 0: 3})
    assert ledger.fingerprint() == before
    ledger.grant({0: 3})
    assert ledger.fingerprint() > before


def test_a_ledger_of_another_corpus_is_refused() -> None:
    with pytest.raises(ValueError, match="counts 10 samples per epoch, this corpus has 11"):
        Ledger(11).load_state_dict(Ledger(10).state_dict())


def test_an_empty_corpus_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one sample"):
        Ledger(0)
