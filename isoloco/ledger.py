"""The ledger: which samples the committed rounds consumed, by whom, and who may read which samples next.

Samples are numbered before any sharding: sample ``g`` is position ``g % samples_per_epoch`` of epoch
``g // samples_per_epoch``. Every group holds the same ledger and changes it by the same rule at the same meeting,
so no message about data is ever sent. A sample is handed out to one group at a time; one that was handed out and
never committed (its group died) is handed out again, so over a run there is no duplicate and no gap.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Interval = tuple[int, int]  # [start, stop) of global sample indices


@dataclass
class Ledger:
    """Replicated record of the samples: what is handed out to whom (``grants``) and what comes next.

    ``samples_per_epoch``: size of the corpus in samples. ``cursor``: the first sample that was never handed out.
    ``returned``: samples that were handed out but not committed, sorted; they go out again before new ones.
    """

    samples_per_epoch: int
    cursor: int = 0
    returned: list[Interval] = field(default_factory=list)
    grants: dict[int, list[Interval]] = field(default_factory=dict)
    version: int = 0

    def __post_init__(self) -> None:
        if self.samples_per_epoch < 1:
            raise ValueError(f"a ledger needs at least one sample per epoch, got {self.samples_per_epoch}")

    def commit(self, round_number: int, participants: Sequence[int]) -> list[dict[str, Any]]:
        """Record that ``participants`` (replica ids) consumed their grants in this round; return the ledger's rows.

        One row per participant and epoch: ``{"round", "epoch", "replica", "samples": [[start, stop), ...]}`` with
        samples counted inside the epoch.
        """
        rows = []
        for replica in sorted(participants):
            by_epoch: dict[int, list[list[int]]] = {}
            for start, stop in self.grants.pop(replica):
                while start < stop:
                    epoch, first = divmod(start, self.samples_per_epoch)
                    end = min(stop, (epoch + 1) * self.samples_per_epoch)
                    by_epoch.setdefault(epoch, []).append([first, first + end - start])
                    start = end
            rows += [
                {"round": round_number, "epoch": epoch, "replica": replica, "samples": samples}
                for epoch, samples in sorted(by_epoch.items())
            ]
        return rows

    def grant(self, num_samples: Mapping[int, int]) -> None:
        """Hand every member (replica id -> number of samples of its next phase) a run of samples, in replica order.

        A member keeps an unread grant; a grant of a group that is no member any more is taken back first.
        """
        before = {replica: list(grant) for replica, grant in self.grants.items()}
        for replica in sorted(set(self.grants) - set(num_samples)):
            self._take_back(self.grants.pop(replica))
        for replica in sorted(num_samples):
            wanted = num_samples[replica]
            kept, surplus = _split(self.grants.get(replica, []), wanted)
            self._take_back(surplus)
            self.grants[replica] = _joined(kept + self._hand_out(wanted - _length(kept)))
        self.version += self.grants != before

    def _take_back(self, intervals: Sequence[Interval]) -> None:
        self.returned = _joined(sorted([*self.returned, *intervals]))

    def _hand_out(self, num_samples: int) -> list[Interval]:
        again, self.returned = _split(self.returned, num_samples)
        fresh = num_samples - _length(again)
        if fresh:
            again.append((self.cursor, self.cursor + fresh))
            self.cursor += fresh
        return again

    def fingerprint(self) -> str:
        """Equal for equal ledgers; of different ledgers of one round, the newer one's sorts higher."""
        content = json.dumps(self.state_dict()).encode()
        return f"{self.version:012d}-{hashlib.blake2b(content, digest_size=8).hexdigest()}"

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready state, equal in all groups after every round."""
        return {
            "samples_per_epoch": self.samples_per_epoch,
            "version": self.version,
            "cursor": self.cursor,
            "returned": [list(interval) for interval in self.returned],
            "grants": {str(replica): [list(i) for i in grant] for replica, grant in sorted(self.grants.items())},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state. Raises ValueError if it counts another corpus."""
        if state["samples_per_epoch"] != self.samples_per_epoch:
            raise ValueError(
                f"the ledger counts {state['samples_per_epoch']} samples per epoch, this corpus has "
                f"{self.samples_per_epoch}: the data, the tokenizer or seq_len changed"
            )
        self.version = state["version"]
        self.cursor = state["cursor"]
        self.returned = [(start, stop) for start, stop in state["returned"]]
        self.grants = {int(replica): [(a, b) for a, b in grant] for replica, grant in state["grants"].items()}


def _length(intervals: Sequence[Interval]) -> int:
    return sum(stop - start for start, stop in intervals)


def _split(intervals: Sequence[Interval], num_samples: int) -> tuple[list[Interval], list[Interval]]:
    """The first ``num_samples`` samples of the intervals, and the rest."""
    head: list[Interval] = []
    tail: list[Interval] = []
    for start, stop in intervals:
        cut = start + min(stop - start, max(0, num_samples - _length(head)))
        if start < cut:
            head.append((start, cut))
        if cut < stop:
            tail.append((cut, stop))
    return head, tail


def _joined(intervals: Sequence[Interval]) -> list[Interval]:
    """Neighbouring intervals made one, order kept."""
    joined: list[Interval] = []
    for start, stop in intervals:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined
