"""A fleet whose replicas are threads of one process, with faults on request: quick enough to try many of them.

It keeps what TorchFTFleet keeps: a meeting waits for everybody who is alive, a failure on one side may or may not be
seen on the other, and a vote can come to different ends in different replicas.
"""

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from isoloco.fleet import Done, FleetError, Handle, Meeting, Member, Transfer

T = TypeVar("T")
PATIENCE = 60.0  # seconds until a test that hangs fails

Fault = Callable[[str], str | None]
"""Is told what a replica is about to do (meet, to_owners, work, from_owners, send, receive, vote); may return

- "fail": it fails for this replica and all who need it
- "fail after": it fails for this replica alone, once its part is done (of a vote: all others commit)
- "crash": the replica is dead from here on
- "crash after": so it is, but its part is done and the others do not notice before they need it again
"""


class CrashError(BaseException):
    """A thread plays that its machine is gone."""


class Network:
    """The lighthouse, and the wires between the threads."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.alive: set[ThreadFleet] = set()
        self.at_the_door: dict[ThreadFleet, Mapping[str, Any]] = {}
        self.call: _Call | None = None

    def wait_for(self, condition: Callable[[], Any]) -> None:
        if not self.changed.wait_for(condition, PATIENCE):
            raise AssertionError(f"a replica waited {PATIENCE:.0f} s in vain")

    def open_meeting_if_all_are_here(self) -> None:
        if self.at_the_door and self.alive == set(self.at_the_door):
            members = sorted(self.at_the_door, key=lambda fleet: fleet.replica_id)
            call = _Call(members, tuple(Member(fleet.replica_id, self.at_the_door[fleet]) for fleet in members))
            for fleet in members:
                fleet.call = call
            self.at_the_door.clear()
            self.changed.notify_all()


class _Call:
    """One meeting's connections."""

    def __init__(self, fleets: "Sequence[ThreadFleet]", members: tuple[Member, ...]) -> None:
        self.fleets = fleets
        self.members = members
        self.broken = False
        self.posted: dict[int, dict[ThreadFleet, Any]] = {}  # number of the collective -> what each one brought
        self.verbs: dict[int, str] = {}
        self.mail: dict[tuple[int, int], list[Tensor]] = {}


class ThreadFleet:
    """One replica of a fleet of threads; a Fleet."""

    def __init__(self, network: Network, replica_id: int, fault: Fault = lambda verb: None) -> None:
        self.network = network
        self.replica_id = replica_id
        self.local_replica_ids = [replica_id]
        self.device = torch.device("cpu")
        self.num_bytes_sent = 0
        self.num_bytes_received = 0
        self.fault = fault
        self.call: _Call | None = None
        self.num_collectives = 0
        with network.changed:
            network.alive.add(self)

    def meet(self, metadata: Sequence[Mapping[str, Any]]) -> Meeting:
        network = self.network
        fault = self._fault("meet")
        with network.changed:
            self.call = None
            self.num_collectives = 0
            network.at_the_door[self] = json.loads(json.dumps(metadata[0]))
            network.open_meeting_if_all_are_here()
            network.wait_for(lambda: self.call is not None)
        assert self.call is not None
        connected = fault is None
        if not connected:
            self.hang_up()
        return Meeting(self.call.members, local=(self.call.fleets.index(self),), connected=connected)

    def to_owners(self, rows: Sequence[Tensor], sizes: Sequence[int]) -> Handle[list[list[Tensor]]]:
        (row,) = rows
        everyone = self._everyone_s("to_owners", row.clone())
        assert self.call is not None
        own = self.call.fleets.index(self)
        self.num_bytes_sent += row.nbytes - sizes[own] * row.element_size()
        return Done([[theirs.split(list(sizes))[own] for theirs in everyone]])

    def from_owners(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> Handle[list[Tensor]]:
        (part,) = parts
        everyone = self._everyone_s("from_owners", part.clone())
        self.num_bytes_sent += (len(everyone) - 1) * part.nbytes
        assert [theirs.numel() for theirs in everyone] == list(sizes)
        return Done([torch.cat(everyone)])

    def work(self, task: Callable[[], T]) -> T:
        try:
            result = task()
        except BaseException:
            self.hang_up()
            raise
        self._everyone_s("work", None)
        return result

    def transfer(self, transfers: Sequence[Transfer | None]) -> Handle[None]:
        (transfer,) = transfers
        call, network = self.call, self.network
        assert call is not None
        if transfer is not None and transfer.send is not None:
            fault = self._fault("send")
            with network.changed:
                call.mail.setdefault((self.replica_id, transfer.peer), []).append(transfer.send.clone())
                network.changed.notify_all()
            self._fail_if(fault)
        if transfer is not None and transfer.receive is not None:
            self._fail_if(self._fault("receive"))
            box = (transfer.peer, self.replica_id)
            with network.changed:
                network.wait_for(lambda: call.mail.get(box) or call.broken)
                if not call.mail.get(box):
                    raise FleetError("the line is dead")
                received = call.mail[box].pop(0)
                assert received.shape == transfer.receive.shape
                assert received.dtype == transfer.receive.dtype
                transfer.receive.copy_(received)
        return Done(None)

    def agree(self, ok: bool) -> bool:
        return ok

    def vote(self, ok: bool) -> bool:
        try:
            return all(self._everyone_s("vote", ok))
        except FleetError:
            return False

    def close(self) -> None:
        self._leave()

    def _everyone_s(self, verb: str, value: Any) -> list[Any]:
        """What all members of the meeting brought to this collective, in replica order."""
        call, network = self.call, self.network
        assert call is not None
        fault = self._fault(verb)
        if fault == "fail":
            self._fail_if(fault)
        with network.changed:
            if call.broken:
                raise FleetError("the line is dead")
            number = self.num_collectives
            self.num_collectives += 1
            assert call.verbs.setdefault(number, verb) == verb, f"{verb} meets {call.verbs[number]}"
            posted = call.posted.setdefault(number, {})
            posted[self] = value
            network.changed.notify_all()
            network.wait_for(lambda: len(posted) == len(call.fleets) or call.broken)
            complete = len(posted) == len(call.fleets)
        if not complete:
            raise FleetError("the line is dead")
        if fault == "crash after":
            self._leave()
            raise CrashError
        if fault == "fail after":
            self._fail_if(fault)
        return [posted[fleet] for fleet in call.fleets]

    def _fault(self, verb: str) -> str | None:
        fault = self.fault(verb)
        if fault == "crash":
            self._leave()
            raise CrashError
        return fault

    def _fail_if(self, fault: str | None) -> None:
        if fault is not None:
            self.hang_up()
            raise FleetError("this replica's line is dead")

    def hang_up(self) -> None:
        with self.network.changed:
            if self.call is not None:
                self.call.broken = True
            self.network.changed.notify_all()

    def _leave(self) -> None:
        with self.network.changed:
            self.network.alive.discard(self)
            self.network.at_the_door.pop(self, None)
            self.network.open_meeting_if_all_are_here()
        self.hang_up()


def run_threads(functions: Mapping[Any, Callable[[], Any]]) -> dict[Any, Any]:
    """Run functions side by side and return what they return; a crashed one returns None, an error is raised here."""
    results: dict[Any, Any] = {}
    errors: list[BaseException] = []

    def run(key: Any, function: Callable[[], Any]) -> None:
        try:
            results[key] = function()
        except CrashError:
            results[key] = None
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=item, daemon=True) for item in functions.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE)
    if errors:
        raise errors[0]
    assert len(results) == len(functions), "a replica hangs"
    return {key: results[key] for key in functions}
