"""What the replica groups of the fleet's tests do: real rounds over a real lighthouse, of a toy or a sharded model."""

import logging
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from isoloco.exchange import Exchange
from isoloco.fleet import Done, Fleet, FleetError, Transfer, sum_in_order
from isoloco.ledger import Ledger
from isoloco.outer_optimizer import OuterOptimizer
from isoloco.outer_round import OuterRound, RoundReport
from isoloco.torchft_fleet import TorchFTFleet
from tests.run_groups import Place
from tests.unit.isoloco.toy_replica import SAMPLES_PER_STEP, ToyReplica, make_round

Fault = Callable[[Place, TorchFTFleet, OuterRound], None]


def connect(place: Place, lighthouse: str, **settings: Any) -> TorchFTFleet:
    return TorchFTFleet(
        replica_id=place.replica_id,
        lighthouse=lighthouse,
        group=dist.group.WORLD if place.num_ranks > 1 else None,
        rank=place.rank,
        world_size=place.num_ranks,
        store_host="127.0.0.1",
        store_port=place.store_port,
        **{"timeout_seconds": 20.0, "quorum_timeout_seconds": 40.0, **settings},
    )


# ---- the verbs ----

SHAPES = ((1,), (2,), (3,), (4,), (5,), (7, 3), (1000,))


def contribution(replica_id: int, shape: tuple[int, ...]) -> Tensor:
    """Numbers of very different sizes, so that the order of a sum shows in its bits."""
    generator = torch.Generator().manual_seed(1000 * replica_id + len(shape) + shape[0])
    return torch.randn(shape, generator=generator) * 10 ** (4 * torch.randn(shape, generator=generator))


def owners_of(num_elements: int, num_members: int) -> list[int]:
    """How many elements each member owns: unequal parts, of the first some, of the last the most or all."""
    sizes = [num_elements // 4 // num_members] * (num_members - 1)
    return [*sizes, num_elements - sum(sizes)]


def use_every_verb(place: Place, lighthouse: str) -> dict[str, Any]:
    fleet = connect(place, lighthouse)
    place.tell("connected")
    place.hear()
    meeting = fleet.meet([{"of": place.replica_id, "text": "θ" * place.replica_id}])
    mine = [contribution(place.replica_id, shape) for shape in SHAPES]
    before = fleet.num_bytes_sent, fleet.num_bytes_received
    ids = [member.replica_id for member in meeting.members]
    sums = []
    for tensor in mine:
        sizes = owners_of(tensor.numel(), len(ids))
        (parts,) = fleet.to_owners([tensor.flatten()], sizes).wait()
        (row,) = fleet.from_owners([sum_in_order(parts)], sizes).wait()
        sums.append(row.view(tensor.shape))
    bytes_of_sums = fleet.num_bytes_sent - before[0], fleet.num_bytes_received - before[1]
    # larger than a socket holds, and both ways at once
    big = torch.full((3_000_000,), float(place.replica_id))
    received = torch.zeros_like(big)
    pair = {ids[0]: ids[1], ids[1]: ids[0]}
    peer = pair.get(place.replica_id)
    fleet.transfer([Transfer(peer, send=big, receive=received) if peer is not None else None]).wait()
    votes = [fleet.vote(True)]
    fleet.meet([{}])
    votes.append(fleet.vote(place.replica_id != ids[0]))
    fleet.meet([{}])
    votes.append(fleet.vote(True))
    return {
        "members": [(member.replica_id, dict(member.metadata)) for member in meeting.members],
        "local": meeting.local,
        "sums": sums,
        "bytes": bytes_of_sums,
        "received": received[[0, -1]].tolist(),
        "votes": votes,
        "inputs unchanged": all(torch.equal(a, contribution(place.replica_id, a.shape)) for a in mine),
    }


# ---- rounds of a toy ----


def flat(tensors: Any) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def state(outer: OuterRound) -> dict[str, Any]:
    """All of a round's state that must be equal in all groups, and what the test looks at beside it."""
    return {
        "digest": outer.digest(),
        "ledger": outer.ledger.state_dict(),
        "history": outer.history,
        "round": outer.round,
        "step": outer.step,
        "run_id": outer.run_id,
        "theta": flat(outer.reference.values()),
        "momentum": flat(outer.optimizer.state[theta]["momentum_buffer"] for theta in outer.reference.values()),
    }


def train_toy(place: Place, lighthouse: str, settings: dict[str, Any], fault: Fault | None = None) -> dict[str, Any]:
    """Train a toy; ask the test before every inner phase, and tell it of every meeting."""
    watch_log(place)
    settings = dict(settings)
    fleet = connect(place, lighthouse, **settings.pop("fleet", {}))
    replica = ToyReplica(seed=settings.pop("seed", 0))
    group = dist.group.WORLD if place.num_ranks > 1 else None
    outer = make_round(fleet, [replica], group=group, **settings)
    if fault is not None:
        fault(place, fleet, outer)
    tell_before_meeting(place, fleet)
    place.tell("connected")
    report = outer.start()
    drift = torch.zeros_like(state(outer)["theta"])
    while True:
        place.tell("meeting", {"report": report, "state": state(outer), "drift": drift, "seen": list(replica.seen)})
        if outer.finished:
            return state(outer)
        if (command := place.hear()) is not None:
            command(outer)
        drift, report = train_phase(outer, replica)


def train_phase(outer: OuterRound, replica: ToyReplica) -> tuple[Tensor, RoundReport]:
    """One phase; θ − θ_i at its end, and the report of the meeting."""
    (replica_id,) = outer.fleet.local_replica_ids
    samples = [sample for start, stop in outer.ledger.grants[replica_id] for sample in range(start, stop)]
    report, drift = None, torch.empty(0)
    for step in range(outer.steps_in_phase):
        loss = replica.learn(samples[step * SAMPLES_PER_STEP : (step + 1) * SAMPLES_PER_STEP])
        drift = flat(outer.reference.values()) - flat(replica.parameters.values())
        report = outer.after_step([10], [loss])
    assert report is not None
    return drift, report


def watch_log(place: Place) -> None:
    """Tell the test every line that the project logs."""

    class Wire(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            place.tell("log", record.getMessage())

    logging.getLogger("isoloco").addHandler(Wire())
    logging.getLogger("isoloco").setLevel(logging.INFO)


def flip_a_bit(outer: OuterRound) -> None:
    outer.reference["bias"].view(torch.int32)[0] ^= 1


# ---- faults ----


def stop_in_second_round_s_exchange(place: Place, fleet: TorchFTFleet, outer: OuterRound) -> None:
    """After the first bucket of round 2, tell the test, and go on when it says so."""
    real = fleet.to_owners
    stopped: list[OuterRound] = []

    def bring_then_stop(rows: Any, sizes: Any) -> Any:
        result = real(rows, sizes).wait()
        if outer.round == 1 and outer not in stopped:
            stopped.append(outer)
            place.tell("exchanging")
            place.hear()
        return Done(result)

    fleet.to_owners = bring_then_stop  # type: ignore[method-assign]


def hear_no_answer_at_second_round_s_vote(place: Place, fleet: TorchFTFleet, outer: OuterRound) -> None:
    """The others hear this group's yes, and it hears nothing: they commit round 2, it does not."""
    real_vote, real_gather = fleet.vote, fleet._all_gather
    missed: list[int] = []

    def gather_and_fail(tensor: Tensor) -> Any:
        real_gather(tensor)
        raise FleetError("no answer")

    def vote(ok: bool) -> bool:
        if outer.round != 1 or missed:
            return real_vote(ok)
        missed.append(outer.round)
        fleet._all_gather = gather_and_fail  # type: ignore[method-assign]
        try:
            return real_vote(ok)
        finally:
            fleet._all_gather = real_gather  # type: ignore[method-assign]

    fleet.vote = vote  # type: ignore[method-assign]


def correct_when_told(place: Place, fleet: TorchFTFleet, outer: OuterRound) -> None:
    """In round 2, tell the test before the correction, and go on when it says so."""
    real = outer.optimizer.correct

    def correct(names: Any) -> Any:
        if outer.round == 1:
            place.tell("correcting")
            place.hear()
        return real(names)

    outer.optimizer.correct = correct  # type: ignore[method-assign]


def tell_every_question(place: Place, fleet: TorchFTFleet, outer: OuterRound) -> None:
    """Tell the test whenever this group asks the others whether they are done."""
    real = fleet._all_gather

    def tell_and_gather(tensor: Tensor) -> Any:
        place.tell("question")
        return real(tensor)

    fleet._all_gather = tell_and_gather  # type: ignore[method-assign]


def tell_before_meeting(place: Place, fleet: TorchFTFleet) -> None:
    real = fleet.meet

    def tell_and_meet(metadata: Any) -> Any:
        place.tell("about to meet")
        return real(metadata)

    fleet.meet = tell_and_meet  # type: ignore[method-assign]


def count_tensors(place: Place, fleet: TorchFTFleet, outer: OuterRound) -> None:
    """Tell the test of every tensor that this group offers to the others."""
    real_to_owners, real_transfer = fleet.to_owners, fleet.transfer

    def tell_and_bring(rows: Any, sizes: Any) -> Any:
        place.tell("tensor", "to_owners")
        return real_to_owners(rows, sizes)

    def tell_and_transfer(transfers: Any) -> Any:
        place.tell("tensor", "transfer")
        return real_transfer(transfers)

    fleet.to_owners, fleet.transfer = tell_and_bring, tell_and_transfer  # type: ignore[method-assign]


# ---- rounds of a sharded model ----

NUM_SHARDED_ROUNDS = 5


def two_layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))  # 7 and 3 rows: uneven over two ranks


def drift_of(replica_id: int, round_number: int, name: str, shape: torch.Size) -> Tensor:
    """What the inner steps of one round do to a parameter of one replica."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)) + 1000 * replica_id + 100 * round_number)
    return 0.1 * torch.randn(shape, generator=generator)


def make_drifting_round(fleet: Fleet, replicas: list[dict[str, Tensor]], **settings: Any) -> OuterRound:
    return OuterRound(
        fleet,
        [replica.items() for replica in replicas],
        partial(OuterOptimizer, lr=0.7, momentum=0.9, isotropic="svd"),
        Ledger(50),
        sync_steps=1,
        total_steps=NUM_SHARDED_ROUNDS,
        samples_per_step=1,
        config={},
        num_replica_groups=2,
        bucket_bytes=64,
        **settings,
    )


@torch.no_grad()
def drift(outer: OuterRound) -> RoundReport:
    """A round in which every replica moves by ``drift_of``."""
    for replica_id, replica in zip(outer.fleet.local_replica_ids, outer.replicas, strict=True):
        for name, parameter in replica.items():
            moved = drift_of(replica_id, outer.round + 1, name, parameter.shape)
            if isinstance(parameter, DTensor):
                moved = distribute_tensor(moved, parameter.device_mesh, parameter.placements).to_local()
                parameter = parameter.to_local()
            parameter.sub_(moved)
    count = len(outer.replicas)
    report = outer.after_step([1] * count, [0.0] * count)
    assert report is not None
    return report


def train_sharded(place: Place, lighthouse: str, failing: dict[int, str]) -> dict[str, Any]:
    """Train a model that FSDP2 shards over the group; ``failing``: round -> what fails once, on this group's rank 1."""
    mesh = init_device_mesh("cpu", (place.num_ranks,))
    model = two_layers()
    fully_shard(model, mesh=mesh)
    replica = dict(model.named_parameters())
    assert all(isinstance(parameter, DTensor) for parameter in replica.values())
    # Longer than a test waits: whoever waits for a rank that has failed must learn it, and not time out.
    fleet = connect(place, lighthouse, timeout_seconds=600.0)
    outer = make_drifting_round(fleet, [replica], group=dist.group.WORLD)
    outer.start()
    reports = []
    while not outer.finished:
        verb = failing.get(outer.round + 1)
        if verb is not None and place.rank == 1:
            break_after_exchange(fleet) if verb == "after the exchange" else break_once(fleet, verb)
        reports.append(drift(outer))
    return {
        "digest": outer.digest(),
        "retries": [report.retries for report in reports],
        "participants": [report.participants for report in reports],
        "norms": [report.pseudo_gradient_norm for report in reports],
        "cosines": [report.cosine for report in reports],
        "whole": {name: parameter.full_tensor() for name, parameter in replica.items()},  # type: ignore[attr-defined]
    }


def break_once(fleet: TorchFTFleet, verb: str) -> None:
    """The next call of an inner verb of this rank finds its lines dead."""
    real = getattr(fleet, verb)

    def broken(*arguments: Any) -> Any:
        setattr(fleet, verb, real)
        fleet._pg.abort()
        return real(*arguments)

    setattr(fleet, verb, broken)


def break_after_exchange(fleet: TorchFTFleet) -> None:
    """The next exchange ends well for all ranks, and then this one alone hears of a failure."""
    real = Exchange.to_owners

    def broken(exchange: Exchange, *arguments: Any) -> None:
        Exchange.to_owners = real  # type: ignore[method-assign]
        real(exchange, *arguments)
        fleet._pg.abort()
        raise FleetError("this rank alone heard of a failure")

    Exchange.to_owners = broken  # type: ignore[method-assign]


# ---- meeting alone ----


def meet_again_after_a_failed_quorum(place: Place, lighthouse: str) -> list[Any]:
    """On rank 1 the first quorum call fails; both ranks need a new Manager, and rank 1 the address of the new one."""
    fleet = connect(place, lighthouse, quorum_timeout_seconds=3.0)
    old = fleet._manager
    if place.rank == 1:

        def fail(**_: Any) -> None:
            raise RuntimeError("the call got lost")

        old.start_quorum = fail  # type: ignore[method-assign]
    try:
        fleet.meet([{}])
    except FleetError as error:
        message = str(error)
    meeting = fleet.meet([{"of": place.replica_id}])
    ((total, *_),) = fleet.to_owners([torch.ones(3)], [3] + [0] * (len(meeting.members) - 1)).wait()
    return [message, fleet._manager is not old, len(meeting.members), total.tolist(), fleet.vote(True)]


def register_and_be_silent(place: Place, lighthouse: str) -> None:
    """A living group that does not come to the meeting."""
    connect(place, lighthouse)
    place.tell("connected")
    place.hear()


class InterruptError(BaseException):
    pass


def wait_to_be_interrupted(place: Place, lighthouse: str) -> str:
    """Wait for others at the lighthouse until a signal comes; where it struck."""
    import signal
    import traceback

    fleet = connect(place, lighthouse)
    real = fleet._manager.start_quorum

    def interrupt(number: int, frame: Any) -> None:
        raise InterruptError

    def tell_and_wait(**arguments: Any) -> None:
        place.tell("waiting", os.getpid())
        real(**arguments)

    signal.signal(signal.SIGTERM, interrupt)
    fleet._manager.start_quorum = tell_and_wait  # type: ignore[method-assign]
    try:
        fleet.meet([{}])
    except InterruptError:
        return traceback.format_exc()
    raise AssertionError("the meeting came about")
