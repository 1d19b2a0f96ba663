"""The fleet: what an outer round needs of the other replicas, and the two fleets that need no network.

A fleet holds one or more *local* replicas. ``VirtualFleet`` holds all of them in one process (a simulation),
``SoloFleet`` holds the only one there is, ``TorchFTFleet`` (torchft_fleet.py) holds one of many machines' groups.
A round is written once, against this protocol; so what a simulation runs is what a real run runs.

Every verb takes and returns one entry per local replica, in the order of ``local_replica_ids``.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class FleetError(RuntimeError):
    """Talking to the other replicas failed. Nothing is lost: the round can be repeated with those who remain."""


@dataclass(frozen=True)
class Member:
    """A replica that came to a meeting, and what it published there."""

    replica_id: int
    metadata: Mapping[str, Any]


@dataclass(frozen=True)
class Meeting:
    """Who is here. ``members`` are sorted by replica id; all of them see the same list.

    ``local``: positions in ``members`` of the replicas that live here, in the order of ``local_replica_ids``.
    ``connected``: False if some ranks cannot talk to their peers; then the members are known, but no verb may be used
    before the next meeting. ``wait_seconds``: how long this replica waited for the last member; ``quorum_seconds``:
    what agreeing on the list cost after that.
    """

    members: tuple[Member, ...]
    local: tuple[int, ...]
    connected: bool = True
    wait_seconds: float = 0.0
    quorum_seconds: float = 0.0


@dataclass(frozen=True)
class Transfer:
    """One side of a transfer with one peer: what to send to it and the buffer to fill from it, either may be None."""

    peer: int
    send: Tensor | None = None
    receive: Tensor | None = None


class Handle(Protocol[T_co]):
    """A communication under way."""

    def wait(self) -> T_co:
        """The result. Raises FleetError if the communication failed."""
        ...


@dataclass(frozen=True)
class Done(Generic[T]):
    """The handle of a communication that is already over."""

    value: T

    def wait(self) -> T:
        return self.value


class Fleet(Protocol):
    """The replicas of a run, as seen by the ones that live here.

    ``device``: where the tensors of a communication must live. ``num_bytes_sent`` and ``num_bytes_received`` count
    what went over the network since the start.
    """

    @property
    def local_replica_ids(self) -> Sequence[int]:
        """The replicas that live here, sorted."""
        ...

    device: torch.device
    num_bytes_sent: int
    num_bytes_received: int

    def meet(self, metadata: Sequence[Mapping[str, Any]]) -> Meeting:
        """Publish one JSON-ready mapping per local replica, wait for the others, and see who is here.

        The members of a meeting are the ones that ``to_owners``, ``from_owners``, ``work``, ``transfer`` and ``vote``
        work with until the next meeting. Raises FleetError if no meeting came about.
        """
        ...

    def to_owners(self, rows: Sequence[Tensor], sizes: Sequence[int]) -> Handle[list[list[Tensor]]]:
        """Bring every member's numbers to their owners.

        ``rows``: per local replica a row (sum(sizes),), of which the first ``sizes[0]`` elements are for the first
        member, the next ``sizes[1]`` for the second, and so on. Returns per local replica what all members, in replica
        order, have sent to it: tensors (sizes[own position],), to be read only.
        """
        ...

    def from_owners(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> Handle[list[Tensor]]:
        """The way back: from every member's own part (sizes[own position],) to the whole row (sum(sizes),), for all."""
        ...

    def work(self, task: Callable[[], T]) -> T:
        """Run something that may take longer than a transfer; returns its result when all members have finished theirs.

        All members do, at the same point of a round; meanwhile they hear of each other. The task must not use the
        fleet. Raises FleetError if one of them is gone.
        """
        ...

    def transfer(self, transfers: Sequence[Transfer | None]) -> Handle[None]:
        """Send to or receive from one peer; None for a local replica that sits it out."""
        ...

    def agree(self, ok: bool) -> bool:
        """Whether ``ok`` holds on every rank of the local replicas. A collective of the own group alone."""
        ...

    def hang_up(self) -> None:
        """Give up the connections of this meeting, so that whoever waits for this rank learns it at once."""
        ...

    def vote(self, ok: bool) -> bool:
        """Whether the round may be applied: True only if every rank of every member said ok.

        Every connected meeting whose members are used ends with exactly one vote, which all ranks reach.
        """
        ...

    def close(self) -> None:
        """Leave the fleet."""
        ...


class VirtualFleet:
    """All replicas of a run in one process (and, if the model is sharded, in the ranks of one process group)."""

    def __init__(
        self,
        replica_ids: Sequence[int],
        *,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        if not replica_ids or len(set(replica_ids)) != len(replica_ids):
            raise ValueError(f"a fleet needs one or more different replica ids, got {list(replica_ids)}")
        self.local_replica_ids = sorted(replica_ids)
        self.device = torch.device(device)
        self.num_bytes_sent = 0
        self.num_bytes_received = 0
        self._group = group

    def meet(self, metadata: Sequence[Mapping[str, Any]]) -> Meeting:
        members = tuple(Member(*pair) for pair in zip(self.local_replica_ids, metadata, strict=True))
        return Meeting(members, local=tuple(range(len(members))))

    def to_owners(self, rows: Sequence[Tensor], sizes: Sequence[int]) -> Handle[list[list[Tensor]]]:
        return Done([list(parts) for parts in zip(*(row.split(list(sizes)) for row in rows), strict=True)])

    def from_owners(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> Handle[list[Tensor]]:
        return Done([torch.cat(list(parts))] * len(parts))

    def work(self, task: Callable[[], T]) -> T:
        return task()

    def transfer(self, transfers: Sequence[Transfer | None]) -> Handle[None]:
        by_replica = dict(zip(self.local_replica_ids, transfers, strict=True))
        for mine in transfers:
            if mine is not None and mine.receive is not None:
                theirs = by_replica[mine.peer]
                assert theirs is not None, "both sides of a transfer must agree"
                assert theirs.send is not None, "both sides of a transfer must agree"
                mine.receive.copy_(theirs.send)
        return Done(None)

    def agree(self, ok: bool) -> bool:
        return agree_in_group(ok, self._group)

    def hang_up(self) -> None:
        pass

    def vote(self, ok: bool) -> bool:
        return self.agree(ok)

    def close(self) -> None:
        pass


def SoloFleet(  # noqa: N802 - the name of a fleet, built like one
    replica_id: int = 0, *, group: dist.ProcessGroup | None = None, device: torch.device | str = "cpu"
) -> VirtualFleet:
    """The fleet of a run that has one replica: a VirtualFleet of one."""
    return VirtualFleet([replica_id], group=group, device=device)


def sum_in_order(tensors: Iterable[Tensor]) -> Tensor:
    """Left-to-right sum of equally shaped tensors: an order that every fleet keeps, so that all get the same bits."""
    remaining = iter(tensors)
    total = next(remaining).clone()
    for tensor in remaining:
        total.add_(tensor)
    return total


def together(fleet: Fleet, talk: Callable[[], T]) -> T:
    """Run something that talks to the other replicas; if it fails on one rank of this group, it fails on all of them.

    So that no rank goes on while one of its own group has given up, and none of another group waits for it. Raises
    FleetError.
    """
    failure: FleetError | None = None
    try:
        result = talk()
    except FleetError as error:
        failure = error
    if not fleet.agree(failure is None) or failure is not None:
        fleet.hang_up()
        raise failure or FleetError("another rank of this group could not talk to the other groups")
    return result


def agree_in_group(ok: bool, group: dist.ProcessGroup | None) -> bool:
    """Whether ``ok`` holds on all ranks of the process group (None: this process alone)."""
    if group is None:
        return ok
    flag = torch.tensor([1 if ok else 0], dtype=torch.int32)
    dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=group)
    return bool(flag.item())


def same_in_group(value: T, group: dist.ProcessGroup | None) -> T:
    """Rank 0's value on every rank of the process group (None: this process alone). The value is pickled."""
    if group is None:
        return value
    values = [value]
    dist.broadcast_object_list(values, group_src=0, group=group)
    return values[0]
