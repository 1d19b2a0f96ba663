"""The outer round: how replicas that trained alone for H steps become one model again.

A round, in order: every group shows who it is and what it has (admission.py); groups that are behind receive the
run's state (healing.py); copies of the pseudo-gradients go to the groups that own the tensors, which average and
correct them and send the result to all (pseudo_gradients.py, exchange.py); all vote; and only after the vote does
anything change: outer step, ledger, the replicas' parameters.
A round that fails at any point before the vote is repeated with the same pseudo-gradients and whoever is left.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from isoloco import healing
from isoloco.admission import (
    Publication,
    StrangerError,
    home,
    reason_to_wait,
    round_to_restore,
    sort_out,
    strangers,
)
from isoloco.aggregate import MEAN, Aggregation
from isoloco.digest import digest
from isoloco.fleet import Fleet, FleetError, same_in_group, together
from isoloco.ledger import Ledger
from isoloco.local_part import local_part, with_local_part
from isoloco.outer_optimizer import NonFiniteError, OuterOptimizer
from isoloco.pseudo_gradients import Members, PseudoGradients
from isoloco.timed import timed

logger = logging.getLogger("isoloco")

PAUSE_SECONDS = 0.5  # between questions to the lighthouse while others are missing


@dataclass
class RoundReport:
    """What one meeting did. ``committed`` is False for one that only agreed on the reference parameters.

    ``registered`` counts the groups the run is configured for (or more, if more came), ``alive`` those at the
    meeting, ``participants`` those whose pseudo-gradient counted. ``seconds``: quorum, exchange, orthogonalize, apply,
    wait, heal. ``loss``: mean over the participants' tokens of this round; ``tokens``: how many these were.
    ``pseudo_gradient_norm`` and, of those that counted, ``cosine`` (of one's own to the mean): per local replica id.
    ``stable_rank``: (before, after) correction, the median over matrices. ``ledger``: rows to keep.
    ``missed``: the records of the rounds that this group was healed over; if its own files tell of a round with such a
    number, or of a later one, these rows belong to no history any more. ``reset_inner``: replica ids whose inner
    optimizer state is spoilt.
    """

    round: int
    step: int
    committed: bool
    registered: int
    alive: int
    participants: list[int]
    weights: dict[int, float]
    digest: str
    seconds: dict[str, float]
    bytes_sent: int
    bytes_received: int
    retries: int
    healed_from: int | None
    loss: float
    tokens: int
    pseudo_gradient_norm: dict[int, float] = field(default_factory=dict)
    cosine: dict[int, float] = field(default_factory=dict)
    stable_rank: tuple[float, float] | None = None
    ledger: list[dict[str, Any]] = field(default_factory=list)
    missed: list[dict[str, Any]] = field(default_factory=list)
    reset_inner: list[int] = field(default_factory=list)

    def record(self) -> dict[str, Any]:
        """What of the round every group keeps, to tell a group that missed it. JSON-ready."""
        return {
            "round": self.round,
            "step": self.step,
            "participants": self.participants,
            "digest": self.digest,
            "tokens": self.tokens,
            "alive": self.alive,
            "registered": self.registered,
            "ledger": self.ledger,
        }


@dataclass
class _Staged:
    """What a round has ready when it comes to the vote, beside ``θ.grad``."""

    healed: healing.Healing | None = None
    cosines: dict[int, float] = field(default_factory=dict)
    stable_ranks: list[tuple[float, float]] = field(default_factory=list)  # (before, after) correction, of every matrix


class OuterRule(Protocol):
    """What happens between inner steps; the only thing that a trainer calls."""

    @property
    def finished(self) -> bool:
        """Whether the last round is committed."""
        ...

    def start(self) -> RoundReport:
        """Meet the others before the first inner step; afterwards all replicas hold the same parameters."""
        ...

    def after_step(self, num_tokens: Sequence[int], loss_sums: Sequence[float | Tensor]) -> RoundReport | None:
        """Count one inner step of every local replica; hold a round if one is due and return its report.

        ``num_tokens`` and ``loss_sums``: per local replica, of this step, over the whole replica group.
        """
        ...


class OuterRound:
    """The rule of DiLoCo, IsoLoCo and their relatives: all groups meet every ``sync_steps`` steps and share θ.

    Args:
        fleet: the replicas of the run.
        replicas: for each local replica its parameters, name -> tensor (plain or DTensor, any float dtype).
        make_optimizer: builds the outer optimizer over (name, θ) pairs; θ and its state are fp32 on the host.
        ledger: the run's ledger; all groups start with equal ones.
        sync_steps, total_steps: H, and the number of inner steps of the whole schedule (the last round may be
            shorter than H). Must be equal in all groups; ``total_steps`` may be raised for a new start of all.
        samples_per_step: how many samples one group reads per inner step.
        config: JSON-ready mapping of everything else that must be equal in all groups.
        weights: ``"uniform"``, or ``"tokens"`` (tokens since the last agreed θ).
        num_replica_groups, min_replica_size: groups of the run, and how many must be alive to commit.
        group: the process group of the local replicas' ranks (None: this process alone).
        aggregation: how the pseudo-gradients of the groups become one: their mean, or a merging rule.
        bucket_bytes: memory that a round may take for what travels.
        start_wait_seconds: how long a start from checkpoints waits for missing groups.
        max_retries: failed attempts at one round before giving up.
        restorable_rounds, restore: the checkpoints that exist, and how to load one: called with a round number, it
            must put the state back through ``load_state_dict``.
        lost: the run's files tell of rounds that no checkpoint here holds.
        waiting_hint: what to tell a person while groups are missing.
    """

    def __init__(
        self,
        fleet: Fleet,
        replicas: Sequence[Iterable[tuple[str, Tensor]]],
        make_optimizer: Callable[[Iterable[tuple[str, Tensor]]], OuterOptimizer],
        ledger: Ledger,
        *,
        sync_steps: int,
        total_steps: int,
        samples_per_step: int,
        config: Mapping[str, Any],
        weights: str = "uniform",
        num_replica_groups: int = 1,
        min_replica_size: int = 1,
        group: dist.ProcessGroup | None = None,
        aggregation: Aggregation = MEAN,
        bucket_bytes: int = 256 * 2**20,
        start_wait_seconds: float = 60.0,
        max_retries: int = 20,
        restorable_rounds: Sequence[int] = (),
        restore: Callable[[int], None] | None = None,
        lost: bool = False,
        waiting_hint: str = "",
    ) -> None:
        if sync_steps < 1 or total_steps < 1:
            raise ValueError(f"sync_steps and total_steps must be at least 1, got {sync_steps} and {total_steps}")
        if weights not in ("uniform", "tokens"):
            raise ValueError(f"weights must be 'uniform' or 'tokens', got {weights!r}")
        self.fleet = fleet
        self.replicas = [dict(replica) for replica in replicas]
        self.names = list(self.replicas[0])
        self.reference = {name: host_copy(parameter) for name, parameter in self.replicas[0].items()}
        self.optimizer = make_optimizer(self.reference.items())
        self.ledger = ledger
        self.round = 0
        self.step = 0
        self.run_id = ""
        self.committed_tokens = 0
        self.history: list[dict[str, Any]] = []  # records of the committed rounds, as far as this group knows them
        self._sync_steps = sync_steps
        self._total_steps = total_steps
        self._samples_per_step = samples_per_step
        # The ledger and the pairing of ranks stand on these two.
        num_ranks = dist.get_world_size(group) if group is not None else 1
        self._config = dict(config) | {"total_steps": total_steps, "ranks of a group": num_ranks}
        self._weights = weights
        self._num_replica_groups = num_replica_groups
        self._min_replica_size = min_replica_size
        self._group = group
        self._bucket_size = max(1, bucket_bytes // 4)
        self._pseudo_gradients = PseudoGradients(
            fleet,
            self.reference,
            self.replicas,
            self.optimizer,
            aggregation,
            group=group,
            bucket_bytes=bucket_bytes,
        )
        self._start_wait_seconds = start_wait_seconds
        self._max_retries = max_retries
        self._restorable_rounds = list(restorable_rounds)
        self._restore = restore
        self._lost = lost
        self._waiting_hint = waiting_hint
        self._started = same_in_group(time.time(), group)
        self._started_monotonic = time.monotonic()
        self._cold = True
        self._start_phase(num_replicas=len(self.replicas), may_count=False)

    @property
    def finished(self) -> bool:
        return self.step >= self._total_steps

    @property
    def steps_in_phase(self) -> int:
        """How many inner steps lie between the last meeting and the next."""
        return max(0, min(self._sync_steps, self._total_steps - self.step))

    def start(self) -> RoundReport:
        return self._meet()

    def after_step(self, num_tokens: Sequence[int], loss_sums: Sequence[float | Tensor]) -> RoundReport | None:
        self._steps_done += 1
        for index in range(len(self.replicas)):
            self._num_tokens[index] += num_tokens[index]
            self._loss_sums[index] = self._loss_sums[index] + loss_sums[index]
        if self._steps_done < self.steps_in_phase:
            return None
        return self._meet()

    def state_dict(self) -> dict[str, Any]:
        """The complete outer state: ``tensors`` (θ and momentum, fp32) and a JSON-ready ``record``."""
        return {"tensors": self._named_state(), "record": self._record()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back (or forward) to a state, tensors included; the replicas' parameters follow."""
        for name, tensor in self._named_state().items():
            tensor.copy_(state["tensors"][name])
        self._load_record(state["record"])
        self.history = [record for record in self.history if record["round"] <= self.round]
        self._copy_reference_to_replicas()
        self._start_phase(len(self.replicas), may_count=False)

    # ---- one meeting ----

    def _meet(self) -> RoundReport:
        retries = 0
        told = -math.inf
        while True:
            try:
                report = self._attempt(retries)
            except FleetError as error:
                retries += 1
                logger.warning("round %d: %s; trying again with the same work (%d)", self.round + 1, error, retries)
                if retries > self._max_retries:
                    raise FleetError(
                        f"round {self.round + 1} failed {retries} times, the last time: {error}"
                    ) from error
                # Once more at once; what fails twice may need a while.
                time.sleep(PAUSE_SECONDS * min(retries - 1, 10))
                continue
            if isinstance(report, RoundReport):
                return report
            if time.monotonic() - told > 10:
                logger.info("%s", report)
                told = time.monotonic()
            time.sleep(PAUSE_SECONDS)

    def _attempt(self, retries: int) -> RoundReport | str:
        """One try at the round. Returns its report, or why it has to wait. Raises FleetError to have another try."""
        sent, received = self.fleet.num_bytes_sent, self.fleet.num_bytes_received
        norms = self._pseudo_gradients.norms() if self._steps_done > 0 else [0.0] * len(self.replicas)
        meeting = self.fleet.meet([asdict(publication) for publication in self._publish(norms)])
        members = [Publication(**member.metadata) for member in meeting.members]
        self._refuse_strangers(members, meeting.local)
        if not meeting.connected:
            raise FleetError("the groups met but could not talk")
        if reason := reason_to_wait(members, self._num_replica_groups, self._min_replica_size):
            return self._waiting(reason, members)
        if (restored := round_to_restore(members)) is not None:
            self._go_back_to(restored)
            return f"going back to round {restored}, the newest that all groups have"

        current, behind = sort_out(members)
        weights = {m.replica_id: 0.0 if m.replica_id in behind else m.weight for m in members}
        commit = any(weights.values())
        if not commit and all(m.rejected for m in members):
            raise NonFiniteError(f"round {self.round + 1}: every replica's pseudo-gradient is non-finite")
        seconds = dict.fromkeys(("exchange", "orthogonalize", "apply", "heal"), 0.0)
        seconds |= {"quorum": meeting.quorum_seconds, "wait": meeting.wait_seconds}

        # Nothing of the run's state changes before the vote, and all of it after.
        staged: _Staged | None = None
        failure: FleetError | None = None
        try:
            staged = self._stage(members, meeting.local, healing.donors(current, behind), weights, norms, seconds)
        except FleetError as error:
            failure = error
        if not self.fleet.vote(staged is not None) or staged is None:
            raise failure or FleetError("another group could not finish the round")
        with timed(seconds, "apply"):
            missed = self._adopt(staged.healed) if staged.healed is not None else []
            rows = self._commit(weights) if commit else []
            self.run_id = home(members).run_id or _new_run_id(members)
            self.ledger.grant({m.replica_id: self._samples_per_step * self.steps_in_phase for m in members})
            self._copy_reference_to_replicas()

        counted = [m for m in members if weights[m.replica_id] > 0]
        report = RoundReport(
            round=self.round,
            step=self.step,
            committed=commit,
            registered=max(self._num_replica_groups, len(members)),
            alive=len(members),
            participants=[m.replica_id for m in counted],
            weights=weights,
            digest=self.digest(),
            seconds=seconds,
            bytes_sent=self.fleet.num_bytes_sent - sent,
            bytes_received=self.fleet.num_bytes_received - received,
            retries=retries,
            healed_from=staged.healed.donor if staged.healed is not None else None,
            loss=_mean_loss(counted),
            tokens=sum(m.num_tokens for m in counted),
            pseudo_gradient_norm=dict(zip(self.fleet.local_replica_ids, norms, strict=True)),
            cosine=staged.cosines,
            stable_rank=_medians(staged.stable_ranks),
            ledger=rows,
            missed=missed,
            reset_inner=[members[position].replica_id for position in meeting.local if members[position].rejected],
        )
        if commit:
            self.committed_tokens += report.tokens
            self.history.append(report.record())
        self._cold = False
        self._start_phase(len(self.replicas), may_count=True)
        return report

    def _stage(
        self,
        members: Sequence[Publication],
        local: Sequence[int],
        donor_of: Mapping[int, int],
        weights: Mapping[int, float],
        norms: Sequence[float],
        seconds: dict[str, float],
    ) -> _Staged:
        """Everything of a round that can fail: heal, exchange, correct; into copies and ``θ.grad`` only.

        Raises FleetError on all ranks of this group if it fails on one.
        """
        staged = _Staged()
        with timed(seconds, "heal"):
            staged.healed = together(self.fleet, lambda: self._heal(donor_of))
        if any(weights.values()):
            attending = Members([m.replica_id for m in members], [weights[m.replica_id] for m in members], local)
            try:
                combined = self._pseudo_gradients.combine(attending, round_number=self.round + 1, seconds=seconds)
            except NonFiniteError as error:
                raise NonFiniteError(f"round {self.round + 1}: {error}") from error
            staged.stable_ranks = combined.stable_ranks
            for replica_id, product, norm in zip(self.fleet.local_replica_ids, combined.products, norms, strict=True):
                if weights[replica_id] > 0:
                    lengths = norm * combined.norm
                    staged.cosines[replica_id] = product / lengths if lengths > 0 else 0.0
        if staged.healed is not None:  # only now: who leaves the exchange early breaks it for the others
            donor = staged.healed.donor
            self._check_received(staged.healed, next(m.digest for m in members if m.replica_id == donor))
        return staged

    # ---- its parts, in the order of the round ----

    def _start_phase(self, num_replicas: int, *, may_count: bool) -> None:
        self._steps_done = 0
        self._may_count = may_count  # only steps from an agreed θ make a contribution
        self._num_tokens = [0] * num_replicas
        self._loss_sums: list[float | Tensor] = [0.0] * num_replicas

    def _publish(self, norms: Sequence[float]) -> list[Publication]:
        own_digest = self.digest()
        patient = time.monotonic() - self._started_monotonic < self._start_wait_seconds
        publications = []
        for index, replica_id in enumerate(self.fleet.local_replica_ids):
            counts = self._may_count and self._steps_done > 0
            rejected = counts and not math.isfinite(norms[index])
            if rejected:
                logger.warning("group %d: its pseudo-gradient is non-finite; it does not count", replica_id)
            weight = {"uniform": 1.0, "tokens": float(self._num_tokens[index])}[self._weights]
            publications.append(
                Publication(
                    replica_id=replica_id,
                    started=self._started,
                    run_id=self.run_id,
                    config=self._config,
                    round=self.round,
                    step=self.step,
                    digest=own_digest,
                    ledger=self.ledger.fingerprint(),
                    cold=self._cold,
                    patient=same_in_group(patient, self._group),
                    lost=self._lost,
                    restorable_rounds=self._restorable_rounds,
                    weight=weight if counts and not rejected else 0.0,
                    rejected=rejected,
                    num_tokens=self._num_tokens[index],
                    loss_sum=float(self._loss_sums[index]),
                )
            )
        return publications

    def _refuse_strangers(self, members: Sequence[Publication], local: Sequence[int]) -> None:
        leaving = strangers(members)
        for position, reason in leaving.items():
            if position in local:
                raise StrangerError(f"group {members[position].replica_id} leaves the run: {reason}")
        if leaving:
            position, reason = next(iter(leaving.items()))
            raise FleetError(f"group {members[position].replica_id} is told to leave: {reason}")

    def _waiting(self, reason: str, members: Sequence[Publication]) -> str:
        present = [m.replica_id for m in members]
        num_missing = max(0, self._num_replica_groups - len(members))
        missing = [replica for replica in range(self._num_replica_groups) if replica not in present]
        text = f"waiting for {num_missing} of {self._num_replica_groups} replica groups (have {present}"
        if len(missing) == num_missing:  # else the groups are not numbered from 0, and nobody knows who is missing
            text += f", missing {missing}"
        return "; ".join(filter(None, (f"{text}): {reason}", self._waiting_hint)))

    def _go_back_to(self, round_number: int) -> None:
        if round_number in self._restorable_rounds and round_number != self.round:
            assert self._restore is not None
            self._restore(round_number)
            self._restorable_rounds = [each for each in self._restorable_rounds if each <= round_number]

    def _heal(self, donor_of: Mapping[int, int]) -> healing.Healing | None:
        """Give the state to the joiners that are ours to heal; receive it if we are behind ourselves."""
        if not donor_of:
            return None
        tensors = [local_part(tensor) for tensor in self._named_state().values()]
        record = self._record() | {"history": self.history}
        return healing.heal(self.fleet, donor_of, record, tensors, self._bucket_size)

    def _check_received(self, healed: healing.Healing, expected: str) -> None:
        """Whether the received state is the donor's, before any of it is used. Raises FleetError."""
        state = self._named_state()
        named = [(name, with_local_part(state[name], local)) for name, local in zip(state, healed.tensors, strict=True)]
        received = digest(named, self._group)
        if received != expected:
            raise FleetError(f"the state received from group {healed.donor} has digest {received}, not {expected}")

    def _adopt(self, healed: healing.Healing) -> list[dict[str, Any]]:
        """Take over a received state; return the records of the rounds that were missed."""
        for tensor, received in zip(self._named_state().values(), healed.tensors, strict=True):
            local_part(tensor).copy_(received)
        self._load_record(healed.record)
        known = {record["round"]: record["digest"] for record in self.history}
        self.history = list(healed.record["history"])
        return [record for record in self.history if known.get(record["round"]) != record["digest"]]

    def _commit(self, weights: Mapping[int, float]) -> list[dict[str, Any]]:
        self.step += self.steps_in_phase
        self.round += 1
        self.optimizer.apply()
        for theta in self.reference.values():
            theta.grad = None
        return self.ledger.commit(self.round, [replica for replica, weight in weights.items() if weight > 0])

    @torch.no_grad()
    def _copy_reference_to_replicas(self) -> None:
        for replica in self.replicas:
            for name, theta in self.reference.items():
                local_part(replica[name]).copy_(local_part(theta))

    # ---- state ----

    def digest(self) -> str:
        """Fingerprint of θ and the outer momentum, 16 hex digits; equal in all groups after every round."""
        return digest(self._named_state().items(), self._group)

    def _named_state(self) -> dict[str, Tensor]:
        """θ and momentum under stable names, in a fixed order."""
        named = {f"reference.{name}": theta.detach() for name, theta in self.reference.items()}
        for name, theta in self.reference.items():
            for key, tensor in self.optimizer.state[theta].items():
                named[f"{key}.{name}"] = tensor
        return named

    def _record(self) -> dict[str, Any]:
        return {
            "run_id": self.run_id,
            "round": self.round,
            "step": self.step,
            "committed_tokens": self.committed_tokens,
            "ledger": self.ledger.state_dict(),
        }

    def _load_record(self, record: Mapping[str, Any]) -> None:
        self.run_id = record["run_id"]
        self.round = record["round"]
        self.step = record["step"]
        self.committed_tokens = record["committed_tokens"]
        self.ledger.load_state_dict(record["ledger"])


def host_copy(parameter: Tensor) -> Tensor:
    """An fp32 copy of a parameter on the host, sharded like it: what stays of θ between rounds, off the device."""
    local = local_part(parameter)
    copy = torch.empty(local.shape, dtype=torch.float32, device="cpu", pin_memory=local.device.type == "cuda")
    return with_local_part(parameter, copy.copy_(local))


def _new_run_id(members: Sequence[Publication]) -> str:
    first = min(members, key=lambda m: m.replica_id)
    return f"{int(first.started * 1000):x}"


def _mean_loss(members: Sequence[Publication]) -> float:
    num_tokens = sum(m.num_tokens for m in members)
    return sum(m.loss_sum for m in members) / num_tokens if num_tokens else math.nan


def _medians(pairs: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
    if not pairs:
        return None
    before, after = (sorted(values)[len(pairs) // 2] for values in zip(*pairs, strict=True))
    return before, after
