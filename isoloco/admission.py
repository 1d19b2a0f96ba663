"""Who takes part in a round, and as what. Pure functions of what the members published: all members decide alike.

DESIGN of a meeting: first the strangers leave (another run, another configuration, a replica id that is taken), then a
start may have to wait for groups that are still missing or go back to a checkpoint that all of them hold, then the
members are sorted into those who hold the run's current state and those who must be healed.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


class StrangerError(ValueError):
    """This group does not belong to the run that it met; it has to leave."""


class HistoryError(ValueError):
    """The groups cannot agree on one history; committing stops."""


@dataclass(frozen=True)
class Publication:
    """What a replica group publishes before any tensor moves. JSON-ready.

    ``started``: wall-clock seconds when the group started, a tie-break only. ``run_id``: empty until the group has a
    history. ``config``: everything that must be equal in all groups. ``round``, ``step``: the last committed round
    whose reference parameters it holds, and the inner step at which that round ended. ``digest``: of these parameters
    and the outer momentum. ``ledger``: fingerprint of its ledger. ``cold``: it has met nobody since it started.
    ``patient``: it still wants to wait for missing groups. ``lost``: its own files tell of rounds that it cannot
    restore. ``restorable_rounds``: its valid checkpoints. ``weight``: 0 for who may not count. ``rejected``: its
    pseudo-gradient was not finite. ``num_tokens``, ``loss_sum``: since the last agreed parameters.
    """

    replica_id: int
    started: float
    run_id: str
    config: Mapping[str, Any]
    round: int
    step: int
    digest: str
    ledger: str
    cold: bool
    patient: bool
    lost: bool
    restorable_rounds: Sequence[int]
    weight: float
    rejected: bool
    num_tokens: int
    loss_sum: float


def home(members: Sequence[Publication]) -> Publication:
    """The member whose run this is: one that is already running, the one with the most rounds, the one started first.

    A group that just came never decides: with an old checkpoint it would drive a living run apart.
    """
    return min(members, key=_seniority)


def _seniority(member: Publication) -> tuple[bool, int, float]:
    return member.cold, -member.round, member.started


def strangers(members: Sequence[Publication]) -> dict[int, str]:
    """Positions in ``members`` of the groups that must leave the run that is at ``home`` here, each with the reason."""
    host = home(members)
    leaving: dict[int, str] = {}
    taken: set[int] = set()
    for position, member in sorted(enumerate(members), key=lambda item: _seniority(item[1])):
        if member.config != host.config:
            leaving[position] = f"its configuration differs: {differences(member.config, host.config)}"
        elif member.run_id and host.run_id and member.run_id != host.run_id:
            leaving[position] = f"it belongs to run {member.run_id}, the others to run {host.run_id}"
        elif member.replica_id in taken:
            leaving[position] = f"replica_id {member.replica_id} is taken by a living group; give it another number"
        else:
            taken.add(member.replica_id)
    return leaving


def differences(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """``"outer.lr: 1.8 here, 0.7 there; ..."`` for all keys whose values differ."""
    return "; ".join(
        f"{key}: {mine.get(key, 'absent')} here, {theirs.get(key, 'absent')} there"
        for key in sorted({*mine, *theirs})
        if mine.get(key) != theirs.get(key)
    )


def reason_to_wait(members: Sequence[Publication], num_replica_groups: int, min_replica_size: int) -> str | None:
    """Why the meeting must not start training yet, or None.

    Groups without a history start only together with all groups. A start from checkpoints waits for all groups as
    long as every member is patient. A running fleet waits only below ``min_replica_size`` members.
    Raises HistoryError if a history existed and nobody here can restore any of it.
    """
    all_cold = all(member.cold for member in members)
    have_history = any(member.round > 0 for member in members)
    all_here = len(members) >= num_replica_groups
    lost = [member.replica_id for member in members if member.lost]
    if all_cold and not have_history and all_here and lost:
        raise HistoryError(
            f"the run files of group {lost[0]} tell of committed rounds, but no group has a checkpoint to restore; "
            f"to start over from nothing, say --fresh"
        )
    if all_cold and not all_here and (not have_history or all(member.patient for member in members)):
        return "the run starts when all groups are there"
    if len(members) < min_replica_size:
        return f"at least {min_replica_size} groups must be there to commit"
    return None


def round_to_restore(members: Sequence[Publication]) -> int | None:
    """The round that somebody here has to go back to before the run can start, or None.

    A cold fleet starts from the newest round that all groups with checkpoints can restore.
    """
    holders = [member for member in members if member.restorable_rounds]
    if not holders or not all(member.cold for member in members):
        return None
    common = set.intersection(*(set(member.restorable_rounds) for member in holders))
    if not common or all(member.round == max(common) for member in holders):
        return None
    return max(common)


def sort_out(members: Sequence[Publication]) -> tuple[list[int], list[int]]:
    """Replica ids of those who hold the run's current state, and of those who must be healed.

    The highest round wins; of different digests of the same round the strict majority's; of different ledgers the
    newest, because a meeting without a commit changes nothing but the ledger. Before the first commit nothing is at
    stake, and the parameters of a running group win, else those of the lowest replica id.
    Raises HistoryError if no digest has a majority: that is corruption, and no rule can say which one is right.
    """
    top = max(member.round for member in members)
    at_top = [member for member in members if member.round == top]
    digest, count = Counter(member.digest for member in at_top).most_common(1)[0]
    if 2 * count <= len(at_top):
        if top > 0:
            held = ", ".join(f"group {member.replica_id} {member.digest}" for member in at_top)
            raise HistoryError(f"the groups hold different states of round {top} and none has a majority: {held}")
        digest = min(at_top, key=lambda member: (member.cold, member.replica_id)).digest
    holders = [member for member in at_top if member.digest == digest]
    ledger = max(member.ledger for member in holders)
    current = [member.replica_id for member in holders if member.ledger == ledger]
    return current, [member.replica_id for member in members if member.replica_id not in current]
