"""A fleet of replica groups on many machines, found and kept together by torchft.

The only module that imports torchft. It uses torchft's lighthouse (who is alive), its Manager (quorum, process group,
the vote inside a group) and its reconfigurable process groups; it does not use torchft's DiLoCo, nor its healing:
what a joiner receives and from whom is the round's decision, and goes through ``transfer``.

Local rank r of a group talks to local rank r of the other groups, so all groups have the same layout.
"""

import contextlib
import http.client
import json
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Generic, TypeVar
from urllib.parse import urlparse

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions, AllToAllOptions
from torchft import Manager, ProcessGroupGloo, ProcessGroupNCCL
from torchft.checkpointing.transport import CheckpointTransport

from isoloco.fleet import (
    FleetError,
    Handle,
    Meeting,
    Member,
    Transfer,
    agree_in_group,
    same_in_group,
)

logger = logging.getLogger("isoloco")

T = TypeVar("T")

SECONDS_BETWEEN_WAIT_MESSAGES = 10.0
_SLICE_SECONDS = 0.2
_MANAGER_CONNECT_SECONDS = 30.0


class LighthouseUnreachableError(ValueError):
    """Nobody answers at the lighthouse's address, or it is no lighthouse that does."""


class _NoTransport(CheckpointTransport[Any]):
    """torchft's own healing is not used, and its HTTP server unpickles whatever a peer sends: open no port for it."""

    def metadata(self) -> str:
        return "<none>"

    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: Any, timeout: timedelta) -> None:
        raise AssertionError("the round heals, not torchft")

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> Any:
        raise AssertionError("the round heals, not torchft")


class _WatchfulClient:
    """torchft's client of its lighthouse, which notices that it talks to a restarted one.

    A lighthouse gives every change of members a higher number, and torchft connects the process group anew only when
    the number has changed. A restarted one counts from one again: torchft would go on with connections to others than
    those who are here.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self._last: tuple[int, list[str]] = (0, [])

    def _quorum(self, **arguments: Any) -> Any:
        result = self._client._quorum(**arguments)
        number, members = self._last
        if result.quorum_id < number or (result.quorum_id == number and result.replica_ids != members):
            raise RuntimeError("the lighthouse was restarted")
        self._last = result.quorum_id, result.replica_ids
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


class TorchFTFleet:
    """One replica group of a run whose groups meet through a torchft lighthouse.

    Args:
        replica_id: this group's number; stable across restarts.
        lighthouse: ``http://host:port``.
        group: the gloo-capable process group of this group's ranks, or None for a group of one rank.
        rank, world_size: of this process inside its group.
        store_host, store_port: the group's TCPStore (torchrun's MASTER_ADDR and MASTER_PORT; it must be listening),
            which the other groups must be able to reach under that name. Rank 0 runs on that host.
        backend: ``"gloo"`` (tensors on the CPU) or ``"nccl"``.
        timeout_seconds: of one transfer or collective between groups.
        quorum_timeout_seconds: how long a meeting may take to come about; longer than an inner phase.
        connect_timeout_seconds: how long to look for the lighthouse before giving up.
    """

    def __init__(
        self,
        *,
        replica_id: int,
        lighthouse: str,
        group: dist.ProcessGroup | None,
        rank: int,
        world_size: int,
        store_host: str,
        store_port: int,
        backend: str = "gloo",
        timeout_seconds: float = 60.0,
        quorum_timeout_seconds: float = 3600.0,
        connect_timeout_seconds: float = 25.0,
    ) -> None:
        self.local_replica_ids = [replica_id]
        self.device = torch.device("cpu" if backend == "gloo" else f"cuda:{torch.cuda.current_device()}")
        self.num_bytes_sent = 0
        self.num_bytes_received = 0
        self.lighthouse = lighthouse
        self._replica_id = replica_id
        self._group = group
        self._rank = rank
        self._world_size = world_size
        self._store = (store_host, store_port)
        self._make_pg = {"gloo": ProcessGroupGloo, "nccl": ProcessGroupNCCL}[backend]
        self._timeout = timedelta(seconds=timeout_seconds)
        self._quorum_timeout = timedelta(seconds=quorum_timeout_seconds)
        self._name = same_in_group(uuid.uuid4().hex, group)  # of this start of the group; a replica id may be taken
        self._members: tuple[Member, ...] = ()
        self._own_rank = 0  # in the process group across groups
        self._ranks: dict[int, int] = {}  # replica id -> rank in the process group across groups
        self._order: list[int] = []  # ranks in the process group across groups, in replica order
        self._thread = ThreadPoolExecutor(1, "isoloco_fleet", initializer=_use, initargs=(self.device,))
        wait_for_lighthouse(lighthouse, connect_timeout_seconds)
        try:
            self._connect()
        except FleetError as error:
            raise LighthouseUnreachableError(
                f"{error}. Check that it is a torchft_lighthouse that runs there"
            ) from error

    def _connect(self) -> None:
        """Start a new Manager and process group on every rank. Raises FleetError on all of them if one fails."""
        self._pg = self._make_pg(timeout=self._timeout)
        # Rank 0 publishes its address in the group's store; the others must not read the one of an earlier manager.
        for my_turn in (self._rank == 0, self._rank != 0):
            failure: Exception | None = None
            if my_turn:
                try:
                    self._manager = self._new_manager()
                    self._manager._client = _WatchfulClient(self._manager._client)
                except Exception as error:  # torchft raises whatever its RPC layer raises
                    failure = error
            if not self.agree(failure is None):
                reason = _first_line(failure) if failure else "another rank of this group failed"
                raise FleetError(f"cannot register with the lighthouse {self.lighthouse}: {reason}") from failure

    def _register_again(self) -> None:
        """Start a new Manager, on a new store."""
        # A Manager whose quorum call failed repeats that failure for ever. And a restarted lighthouse counts its
        # quorums from one again, from which torchft makes the keys of a rendezvous: in a store that has seen that
        # number before, the ranks would read each other's old addresses.
        host = self._store[0]
        if self._rank == 0:
            self._own_store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        self._store = host, same_in_group(self._own_store.port if self._rank == 0 else 0, self._group)
        with contextlib.suppress(Exception):
            self._pg.abort()
            self._manager.shutdown(wait=False)
        self._connect()

    def _new_manager(self) -> Manager:
        return Manager(
            pg=self._pg,
            load_state_dict=None,
            state_dict=None,
            min_replica_size=1,
            use_async_quorum=False,
            init_sync=False,
            timeout=self._timeout,
            quorum_timeout=self._quorum_timeout,
            # torchft waits timeout / (retries + 1) after a failed call: ask a restarted lighthouse about once a second.
            # Without retries it never tells that a call has failed, and a meeting hangs until its timeout.
            quorum_retries=int(self._quorum_timeout.total_seconds()),
            connect_timeout=timedelta(seconds=_MANAGER_CONNECT_SECONDS),
            rank=self._rank,
            world_size=self._world_size,
            store_addr=self._store[0],
            store_port=self._store[1],
            lighthouse_addr=self.lighthouse,
            replica_id=str(self._replica_id),
            hostname=self._store[0],
            checkpoint_transport=_NoTransport(),
        )

    def meet(self, metadata: Sequence[Mapping[str, Any]]) -> Meeting:
        started = time.monotonic()
        failure: Exception | None = None
        try:
            self._start(lambda: self._manager.start_quorum(allow_heal=False)).wait()
        except Exception as error:  # torchft raises whatever its RPC layer raises
            failure = error
        if not self.agree(failure is None):
            self._register_again()
            reason = _first_line(failure) if failure else "another rank of this group failed"
            raise FleetError(f"no quorum at {self.lighthouse}: {reason}") from failure
        waited = time.monotonic() - started
        published: list[Any] | None = None
        failure = self._manager.errored()
        if failure is None:
            mine = {
                "name": self._name,
                "replica_id": self._replica_id,
                "seconds": waited,
                "metadata": dict(metadata[0]),
            }
            try:
                published = self._start(lambda: self._gather_json(mine)).wait()
            except FleetError as error:
                failure = error
        connected = self.agree(published is not None)
        if not connected:
            self.hang_up()
            self._end_meeting(False)
        # What rank 0 heard goes for the whole group, so that its ranks never decide differently.
        published = same_in_group(published, self._group)
        if published is None:
            raise FleetError(f"the groups met but could not talk: {_first_line(failure)}")
        replica_ids = [entry["replica_id"] for entry in published]
        self._own_rank = [entry["name"] for entry in published].index(self._name)
        self._ranks = {replica: rank for rank, replica in enumerate(replica_ids)}
        self._order = sorted(range(len(replica_ids)), key=lambda rank: replica_ids[rank])
        self._members = tuple(Member(replica_ids[rank], published[rank]["metadata"]) for rank in self._order)
        # The last one to arrive waited least: what it took is the price of agreeing, the rest is waiting.
        agreeing = min(entry["seconds"] for entry in published)
        return Meeting(
            self._members,
            local=(self._order.index(self._own_rank),),
            connected=connected,
            wait_seconds=waited - agreeing,
            quorum_seconds=time.monotonic() - started - (waited - agreeing),
        )

    def to_owners(self, rows: Sequence[Tensor], sizes: Sequence[int]) -> Handle[list[list[Tensor]]]:
        (row,) = rows

        def run() -> list[list[Tensor]]:
            parts = row.split(list(sizes))
            mine = [parts[self._order.index(self._own_rank)].numel()] * len(self._order)
            received = self._all_to_all([parts[self._order.index(rank)] for rank in range(len(parts))], mine)
            return [[received[rank] for rank in self._order]]

        return self._start(run)

    def from_owners(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> Handle[list[Tensor]]:
        (part,) = parts

        def run() -> list[Tensor]:
            by_rank = [sizes[self._order.index(rank)] for rank in range(len(self._order))]
            received = self._all_to_all([part] * len(by_rank), by_rank)
            return [torch.cat([received[rank] for rank in self._order])]

        return self._start(run)

    def _all_to_all(self, outgoing: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """Send ``outgoing[rank]`` to every rank across groups, receive ``sizes[rank]`` elements from each."""
        if len(outgoing) == 1:
            return list(outgoing)
        received = outgoing[0].new_empty(sum(sizes))
        with self._talking():
            self._pg.alltoall_base(
                received, torch.cat(list(outgoing)), list(sizes), [len(each) for each in outgoing], AllToAllOptions()
            ).wait()
        own = self._own_rank
        self.num_bytes_sent += sum(each.nbytes for rank, each in enumerate(outgoing) if rank != own)
        self.num_bytes_received += received.nbytes - sizes[own] * received.element_size()
        return list(received.split(list(sizes)))

    def work(self, task: Callable[[], T]) -> T:
        done = threading.Event()
        others = self._start(lambda: self._wait_for_all(done))
        try:
            result = task()
        except BaseException:
            self.hang_up()
            raise
        finally:
            done.set()
        others.wait()
        return result

    def _wait_for_all(self, done: threading.Event) -> None:
        """Return when the others have done theirs as well.

        Asks again and again: so no question waits for longer than a transfer may, however long the work is.
        """
        pause = 0.001
        while True:
            flag = torch.tensor([1 if done.is_set() else 0], dtype=torch.int32, device=self.device)
            if all(each.item() for each in self._all_gather(flag)):
                return
            time.sleep(pause)
            pause = min(1.5 * pause, 0.1)

    def transfer(self, transfers: Sequence[Transfer | None]) -> Handle[None]:
        (transfer,) = transfers

        def run() -> None:
            if transfer is None:
                return

            def send() -> None:
                if transfer.send is not None:
                    self._pg.send([transfer.send], peer, 0).wait()
                    self.num_bytes_sent += transfer.send.nbytes

            def receive() -> None:
                if transfer.receive is not None:
                    self._pg.recv([transfer.receive], peer, 0).wait()
                    self.num_bytes_received += transfer.receive.nbytes

            peer = self._ranks[transfer.peer]
            with self._talking():
                # Two that send first wait for each other for ever.
                for half in (send, receive) if self._own_rank < peer else (receive, send):
                    half()

        return self._start(run)

    def agree(self, ok: bool) -> bool:
        return agree_in_group(ok, self._group)

    def hang_up(self) -> None:
        self._pg.abort()

    def vote(self, ok: bool) -> bool:
        ok = self.agree(ok)
        if len(self._members) > 1:
            try:
                flag = torch.tensor([1 if ok else 0], dtype=torch.int32, device=self.device)
                flags = self._start(lambda: self._all_gather(flag)).wait()
                ok = all(flag.item() for flag in flags)
            except FleetError as error:
                logger.warning("group %d: no answer from the other groups at the vote: %s", self._replica_id, error)
                ok = False
        return self._end_meeting(ok)

    def _end_meeting(self, ok: bool) -> bool:
        """Whether all ranks of this group said ok; if not, torchft builds a new process group at the next meeting."""
        if not ok:
            self._manager.report_error(FleetError("the round failed"))
        try:
            committed = self._manager.should_commit()
        except Exception as error:  # torchft raises whatever its RPC layer raises
            logger.warning("group %d: no agreement at the vote: %s", self._replica_id, _first_line(error))
            committed = False
        return self.agree(committed)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._pg.abort()
        self._manager.shutdown(wait=False)

    def _start(self, run: Callable[[], T]) -> Handle[T]:
        others = [member.replica_id for member in self._members if member.replica_id not in self.local_replica_ids]
        whom = f"groups {', '.join(map(str, others))}" if others else "other groups"
        return _UnderWay(self._thread.submit(run), f"{whom} (lighthouse {self.lighthouse})")

    def _gather_json(self, value: Any) -> list[Any]:
        """Every member's JSON value, in the order of the process group's ranks."""
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(self.device)
        lengths = self._all_gather(torch.tensor([len(data)], device=self.device))
        padded = torch.zeros(int(max(length.item() for length in lengths)), dtype=torch.uint8, device=self.device)
        padded[: len(data)] = data
        texts = self._all_gather(padded)
        return [
            json.loads(bytes(text[: int(length.item())].tolist())) for text, length in zip(texts, lengths, strict=True)
        ]

    def _all_gather(self, tensor: Tensor) -> list[Tensor]:
        with self._talking():
            if self._pg.size() == 1:
                return [tensor.clone()]
            received = [torch.empty_like(tensor) for _ in range(self._pg.size())]
            self._pg.allgather([received], [tensor], AllgatherOptions()).wait()
        num_bytes = (len(received) - 1) * tensor.nbytes
        self.num_bytes_sent += num_bytes
        self.num_bytes_received += num_bytes
        return received

    @contextlib.contextmanager
    def _talking(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, AssertionError, OSError) as error:  # what torchft's groups raise on a dead or slow peer
            self._manager.report_error(error)
            self.hang_up()
            raise FleetError(_first_line(error)) from error


@dataclass(frozen=True)
class _UnderWay(Generic[T]):
    """A communication that the fleet's own thread carries out; waiting for it can be interrupted by a signal.

    ``whom``: who else takes part, to be told to a person who waits.
    """

    future: "Future[T]"
    whom: str

    def wait(self) -> T:
        started = told = time.monotonic()
        # In slices, because a signal that comes just before a wait is seen only when the wait ends.
        while not wait([self.future], _SLICE_SECONDS).done:
            if time.monotonic() - told >= SECONDS_BETWEEN_WAIT_MESSAGES:
                told = time.monotonic()
                logger.info("waiting for %s, for %.0f s now", self.whom, told - started)
        return self.future.result()


def _use(device: torch.device) -> None:
    """Have this thread work on the device that the main thread works on."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _first_line(error: object) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def wait_for_lighthouse(address: str, timeout_seconds: float) -> None:
    """Return once a lighthouse answers at ``http://host:port``.

    Raises LighthouseUnreachableError after ``timeout_seconds``, or at once if the address is no address.
    """
    url = urlparse(address)
    try:
        host, port = url.hostname, url.port
    except ValueError:
        host, port = None, None
    if url.scheme != "http" or not host or not port:
        raise LighthouseUnreachableError(f"lighthouse address {address!r} is not of the form http://host:port")
    deadline = time.monotonic() + timeout_seconds
    num_tries = 0
    while True:
        num_tries += 1
        try:
            status = _status(host, port, timeout=min(5.0, max(0.5, deadline - time.monotonic())))
            if status == 200:
                return
            reason = f"something else answers there (HTTP status {status})"
        except http.client.HTTPException:
            reason = "something else answers there"
        except OSError as error:
            reason = str(error)
        if time.monotonic() + 0.5 > deadline:
            raise LighthouseUnreachableError(
                f"no lighthouse at {address}: {reason} (tried {num_tries} times in {timeout_seconds:.0f} s). "
                f"Check that torchft_lighthouse runs there, the port, and that a firewall lets it through"
            )
        time.sleep(0.5)


def _status(host: str, port: int, timeout: float) -> int:
    """HTTP status of the page that every lighthouse has."""
    connection = http.client.HTTPConnection(host, port, timeout=timeout)
    try:
        connection.request("GET", "/status")
        return connection.getresponse().status
    finally:
        connection.close()
