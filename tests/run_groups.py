"""Replica groups for a test: each a set of real processes with real gloo, which a test talks to, and may kill.

The processes are forked from one that has imported torch and torchft already, so that a group starts in a moment.
"""

import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from tests.run_ranks import free_port

os.environ.setdefault("RUST_LOG", "error")  # torchft's own log tells every call
PATIENCE = 60.0  # seconds until a test that hangs fails

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed.fsdp", "torchft", "tests.distributed.training_groups"])


@dataclass(frozen=True)
class Place:
    """Where a process stands: its group, and its rank there. ``tell`` and ``hear`` talk to the test."""

    replica_id: int
    rank: int
    num_ranks: int
    store_port: int
    wire: Connection

    def tell(self, event: str, value: Any = None) -> None:
        self.wire.send_bytes(pickle.dumps((event, value)))  # send() would share tensors' memory, which ends with us

    def hear(self) -> Any:
        """What the test says next; waits for it."""
        return pickle.loads(self.wire.recv_bytes())


class Group:
    """A replica group as the test sees it."""

    def __init__(self, replica_id: int, num_ranks: int, function: Callable[..., Any], arguments: tuple[Any, ...]):
        self.replica_id = replica_id
        self._processes = []
        self._wires: list[Connection] = []
        self._heard: list[list[tuple[str, Any]]] = [[] for _ in range(num_ranks)]  # and not yet asked for
        port = free_port()
        for rank in range(num_ranks):
            mine, theirs = _context.Pipe()
            place = Place(replica_id, rank, num_ranks, port, theirs)
            process = _context.Process(target=_rank_main, args=(place, function, arguments), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._wires.append(mine)

    def expect(self, event: str, seconds: float = PATIENCE) -> Any:
        """Wait until every rank has told this event; rank 0's value. Other events before it are passed over."""
        return self.expect_all(event, seconds)[0]

    def expect_all(self, event: str, seconds: float = PATIENCE) -> list[Any]:
        """As ``expect``; the values of all ranks."""
        deadline = time.monotonic() + seconds
        return [self._wait_for(rank, event, deadline) for rank in range(len(self._wires))]

    def has_told(self, event: str) -> bool:
        """Whether rank 0 has told this event already, and nobody asked for it yet."""
        with suppress(EOFError):
            while self._wires[0].poll():
                self._heard[0].append(pickle.loads(self._wires[0].recv_bytes()))
        return any(told == event for told, _ in self._heard[0])

    def events_until(self, event: str, seconds: float = PATIENCE) -> list[tuple[str, Any]]:
        """Everything that rank 0 tells until this event, that one included."""
        deadline = time.monotonic() + seconds
        events: list[tuple[str, Any]] = []
        while not events or events[-1][0] != event:
            events.append(self._next(0, event, deadline))
        return events

    def result(self, seconds: float = PATIENCE) -> Any:
        """What the function returned on rank 0; an exception that it raised on any rank is raised here as text."""
        return self.expect("returned", seconds)

    def _wait_for(self, rank: int, event: str, deadline: float) -> Any:
        while True:
            told, value = self._next(rank, event, deadline)
            if told == event:
                return value
            assert told not in ("raised", "returned"), f"{told} before {event!r}: {value}"

    def _next(self, rank: int, wanted: str, deadline: float) -> tuple[str, Any]:
        if self._heard[rank]:
            return self._heard[rank].pop(0)
        name = f"rank {rank} of group {self.replica_id}"
        assert self._wires[rank].poll(max(0.0, deadline - time.monotonic())), f"no {wanted!r} from {name}"
        try:
            event: tuple[str, Any] = pickle.loads(self._wires[rank].recv_bytes())
        except EOFError:
            raise AssertionError(f"{name} ended before {wanted!r}") from None
        return event

    def say(self, value: Any = None) -> None:
        """Answer to ``hear`` of every rank."""
        for wire in self._wires:
            wire.send_bytes(pickle.dumps(value))

    def signal(self, number: int) -> None:
        for process in self._processes:
            assert process.pid is not None
            os.kill(process.pid, number)

    def kill(self) -> None:
        """kill -9 of every process; returns when they are gone."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(10)


class Groups:
    """The groups of a test; whatever is left of them is killed at its end."""

    def __init__(self) -> None:
        self._groups: list[Group] = []

    def start(self, replica_id: int, function: Callable[..., Any], *arguments: Any, num_ranks: int = 1) -> Group:
        """Run ``function(place, *arguments)`` on every rank of a new group. It must be importable."""
        self._groups.append(Group(replica_id, num_ranks, function, arguments))
        return self._groups[-1]


@contextmanager
def running_groups() -> Iterator[Groups]:
    groups = Groups()
    try:
        yield groups
    finally:
        for group in groups._groups:
            group.kill()


def _rank_main(place: Place, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    try:
        address = f"tcp://127.0.0.1:{place.store_port}"
        dist.init_process_group("gloo", init_method=address, rank=place.rank, world_size=place.num_ranks)
        place.tell("returned", function(place, *arguments))
        dist.barrier()  # rank 0 serves the store: the others may still need it
    except (EOFError, BrokenPipeError):
        pass  # the test is over
    except BaseException:
        place.tell("raised", traceback.format_exc())
    finally:
        os._exit(0)  # torchft's threads would keep the process
