"""Pseudo-gradients: what replicas have learned since they last agreed, and how it becomes one outer gradient.

The reference parameters θ and all that is computed here live on the host; the trained parameters θᵢ may be elsewhere.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from isoloco.aggregate import Aggregation
from isoloco.buckets import Span, whole_spans
from isoloco.digest import counted_here
from isoloco.exchange import Exchange, owned_spans, share_out
from isoloco.fleet import Fleet, sum_in_order, together
from isoloco.local_part import chunks, is_finite, local_part, with_local_part
from isoloco.outer_optimizer import NonFiniteError, OuterOptimizer
from isoloco.timed import timed
from isoloco.whole_matrix import Job

T = TypeVar("T")


@dataclass(frozen=True)
class Members:
    """The replicas that came to a meeting, sorted by id."""

    replica_ids: Sequence[int]
    weights: Sequence[float]
    """0 for those that do not count."""
    local: Sequence[int]
    """Positions of those that live here."""

    @property
    def counted(self) -> list[int]:
        """Positions of those that count."""
        return [position for position, weight in enumerate(self.weights) if weight > 0]


@dataclass(frozen=True)
class Combined:
    """What is known of Δ̄, the average before its correction; the same in all groups."""

    norm: float
    products: list[float]
    """⟨Δᵢ, Δ̄⟩ of the local replicas; 0 for one that does not count."""
    stable_ranks: list[tuple[float, float]]
    """Of every corrected matrix, before and after."""


class PseudoGradients:
    """Δᵢ = θ − θᵢ of the local replicas, and Δ̄ of all of them.

    Args:
        fleet: the replicas of the run.
        reference: θ, name -> tensor (fp32, on the host, plain or DTensor).
        replicas: for each local replica its θᵢ, in the same order of names.
        optimizer: the outer optimizer over θ: says which matrices are corrected, and corrects them.
        aggregation: how the pseudo-gradients of the members become one.
        group: the process group of the local replicas' ranks (None: this process alone).
        bucket_bytes: what the buffers that travel may take.
    """

    def __init__(
        self,
        fleet: Fleet,
        reference: Mapping[str, Tensor],
        replicas: Sequence[Mapping[str, Tensor]],
        optimizer: OuterOptimizer,
        aggregation: Aggregation,
        *,
        group: dist.ProcessGroup | None,
        bucket_bytes: int,
    ) -> None:
        self.fleet = fleet
        self._names = list(reference)
        self._reference = list(reference.values())
        self._replicas = [[replica[name] for name in self._names] for replica in replicas]
        self._optimizer = optimizer
        self._aggregation = aggregation
        self._group = group
        self._bucket_bytes = bucket_bytes
        self._corrected = sorted(self._names.index(name) for name in optimizer.split_sizes)
        self._merged = {i for i, theta in enumerate(self._reference) if aggregation.needs_every_delta(theta.shape)}

    def norms(self) -> list[float]:
        """‖Δᵢ‖ of every local replica over its whole group."""
        squares = torch.zeros(len(self._replicas), dtype=torch.float64)
        for index, trained in enumerate(self._replicas):
            for theta, theta_i in self._counted_once(trained):
                for ours, theirs in chunks(local_part(theta), local_part(theta_i)):
                    squares[index] += (ours - theirs.to(ours)).double().square().sum()
        return self._reduce(squares, dist.ReduceOp.SUM).sqrt().tolist()

    def combine(
        self,
        members: Members,
        *,
        round_number: int,
        seconds: dict[str, float],  # what "exchange", "orthogonalize" and "wait" take is added here
    ) -> Combined:
        """Put Δ̄ of every tensor, corrected, into ``θ.grad``; for ``target="update"`` the updates into the optimizer.

        Each tensor is summed and corrected by one of the members that count. Raises FleetError, on all ranks of this
        group if on one, and NonFiniteError in all groups if Δ̄ is not finite.
        """
        whole, spans = self._share_out(members)
        gradients = {}
        for index, theta in enumerate(self._reference):
            theta.grad = with_local_part(theta, torch.zeros_like(local_part(theta)))
            gradients[index] = local_part(theta.grad).view(-1)
        products = torch.zeros(1 + len(members.weights), dtype=torch.float64)  # of Δ̄ with itself and with every Δᵢ

        with timed(seconds, "exchange"):
            summed = [[span for span in mine if span.index not in self._merged] for mine in spans]
            self._sum(members, summed, gradients, products)
        if self._merged:
            self._merge(members, whole, products, round_number=round_number, seconds=seconds)
        if self._optimizer.target == "update":
            with timed(seconds, "exchange"):  # momentum takes in Δ̄, whatever becomes of the update
                together(self.fleet, partial(self._exchange(members, spans).from_owners, gradients))
        own = [index for position in members.local for index in whole[position]]
        stable_ranks = self._work(partial(self._correct, own), seconds)
        if not self._is_finite(own):
            products[0] = math.nan  # all groups learn it with what the owners have found
        with timed(seconds, "exchange"):
            if self._optimizer.target == "update":
                gradients = {i: local_part(self._update(i)).view(-1) for i in self._corrected}
                spans = [[span for span in mine if span.index in self._corrected] for mine in spans]
            together(self.fleet, partial(self._exchange(members, spans).from_owners, gradients))
            return self._share_findings(members, products, stable_ranks, whole)

    # ---- its parts ----

    def _share_out(self, members: Members) -> tuple[list[list[int]], list[list[Span]]]:
        """What every member owns: numbers of the tensors that must be whole, and elements of this rank's parts."""
        # Members that share a process share θ.grad as well: one owner among them is enough.
        owners = members.counted if len(members.local) == 1 else members.counted[:1]
        shapes = [theta.shape for theta in self._reference]
        sizes = [local_part(theta).numel() for theta in self._reference]
        shares = share_out(shapes, sorted({*self._corrected, *self._merged}), len(owners))
        whole: list[list[int]] = [[] for _ in members.weights]
        spans: list[list[Span]] = [[] for _ in members.weights]
        for owner, mine, elements in zip(owners, shares, owned_spans(sizes, shares), strict=True):
            whole[owner], spans[owner] = mine, elements
        return whole, spans

    def _exchange(self, members: Members, spans: Sequence[Sequence[Span]]) -> Exchange:
        return Exchange(self.fleet, spans, members.local, bucket_bytes=self._bucket_bytes)

    def _contribute(self, members: Members, replica: int, span: Span, out: Tensor) -> None:
        """Write Δᵢ of a span into ``out`` (elements,), fp32."""
        if members.weights[members.local[replica]] == 0:
            out.zero_()  # never 0·Δᵢ, which may be NaN
            return
        theta = local_part(self._reference[span.index]).view(-1)[span.start : span.stop]
        theta_i = local_part(self._replicas[replica][span.index]).reshape(-1)[span.start : span.stop]
        torch.sub(theta, theta_i.to(theta), out=out)

    def _mean(self, members: Members, parts: Sequence[Tensor], products: Tensor, index: int) -> Tensor:
        """Σ wᵢ Δᵢ / Σ wᵢ of a span of tensor ``index``, given Δᵢ of all members; its ``products`` are added up."""
        # Each product and each sum is rounded by itself: the same bits everywhere.
        weighted = (parts[position].mul(members.weights[position]) for position in members.counted)
        mean = sum_in_order(weighted).div_(sum(members.weights))
        if counted_here(self._reference[index], self._group):
            for wide, *deltas in chunks(mean, *parts):
                wide = wide.double()
                products[0] += wide.square().sum().cpu()
                for member, delta in enumerate(deltas):
                    products[1 + member] += delta.double().mul_(wide).sum().cpu()
        return mean

    def _sum(
        self, members: Members, spans: Sequence[Sequence[Span]], gradients: Mapping[int, Tensor], products: Tensor
    ) -> None:
        """Δ̄ of the spans that are owned here, into ``gradients``."""

        def take(span: Span, parts: Sequence[Tensor]) -> None:
            mean = self._mean(members, parts, products, span.index)
            gradients[span.index][span.start : span.stop].copy_(mean)

        exchange = self._exchange(members, spans)
        together(self.fleet, partial(exchange.to_owners, partial(self._contribute, members), take))

    def _merge(
        self,
        members: Members,
        whole: Sequence[Sequence[int]],
        products: Tensor,
        *,
        round_number: int,
        seconds: dict[str, float],
    ) -> None:
        """Let the owners merge the Δᵢ of the tensors of which the rule needs every one, into ``θ.grad``.

        As many tensors at a time as each owner has ranks: no rank ever holds more than one tensor of every member.
        """
        counted = members.counted
        merged = [[index for index in mine if index in self._merged] for mine in whole]
        num_ranks = 1 if self._group is None else dist.get_world_size(self._group)
        sizes = [local_part(theta).numel() for theta in self._reference]
        for start in range(0, max(map(len, merged)), num_ranks):
            wave = [mine[start : start + num_ranks] for mine in merged]
            own = [index for position in members.local for index in wave[position]]
            deltas = {index: [torch.zeros_like(local_part(self._reference[index])) for _ in counted] for index in own}

            def take(span: Span, parts: Sequence[Tensor], deltas: dict[int, list[Tensor]] = deltas) -> None:
                self._mean(members, parts, products, span.index)
                for delta, position in zip(deltas[span.index], counted, strict=True):
                    delta.view(-1)[span.start : span.stop].copy_(parts[position])

            def merge(numbers: list[int], stacks: list[Tensor], own: list[int] = own) -> Tensor:
                merged_tensors = [
                    self._aggregation.merge(
                        [stack[place] for stack in stacks],
                        weights=[members.weights[position] for position in counted],
                        replica_ids=[members.replica_ids[position] for position in counted],
                        name=self._names[own[number]],
                        round_number=round_number,
                    )
                    for place, number in enumerate(numbers)
                ]
                return torch.stack(merged_tensors)

            with timed(seconds, "exchange"):
                exchange = self._exchange(members, [whole_spans(sizes, indices) for indices in wave])
                together(self.fleet, partial(exchange.to_owners, partial(self._contribute, members), take))
            jobs = []
            for index in own:
                theta = self._reference[index]
                assert theta.grad is not None
                jobs.append(Job(tuple(with_local_part(theta, delta) for delta in deltas[index]), theta.grad))
            self._work(partial(self._optimizer.whole_matrices.apply, jobs, merge), seconds)

    def _work(self, task: Callable[[], T], seconds: dict[str, float]) -> T:
        """What an owner does with its tensors, for as long as it takes; returns when all owners are done."""

        def timed_task() -> T:
            with timed(own, "orthogonalize"):
                return task()

        own = {"orthogonalize": 0.0}
        started = monotonic()
        result = together(self.fleet, partial(self.fleet.work, timed_task))
        seconds["orthogonalize"] += own["orthogonalize"]
        seconds["wait"] += monotonic() - started - own["orthogonalize"]
        return result

    def _correct(self, own: Sequence[int]) -> Tensor:
        """Correct the matrices among ``own``. (2·matrices,): the stable ranks of those worked on in this group."""
        stable_ranks = torch.zeros(2 * len(self._corrected), dtype=torch.float64)
        try:
            worked_on = self._optimizer.correct([self._names[index] for index in own])
        except NonFiniteError:
            worked_on = {}  # the others must see it, too: it goes back to them as it is
        for name, pair in worked_on.items():
            place = self._corrected.index(self._names.index(name))
            stable_ranks[2 * place : 2 * place + 2] = torch.tensor(pair)
        # Not the sum: a plain tensor is worked on by every rank.
        return self._reduce(stable_ranks, dist.ReduceOp.MAX)

    def _update(self, index: int) -> Tensor:
        """The corrected update of a matrix, for ``target="update"``."""
        (update,) = self._optimizer.updates([self._names[index]])
        return update

    def _is_finite(self, own: Sequence[int]) -> bool:
        """Whether what this rank has of these tensors may be sent to all: what overflows in a correction may not."""
        tensors = [self._reference[index].grad for index in own]
        if self._optimizer.target == "update":
            tensors += [self._update(index) for index in own if index in self._corrected]
        return all(is_finite(tensor) for tensor in tensors if tensor is not None)

    def _share_findings(
        self, members: Members, products: Tensor, stable_ranks: Tensor, whole: Sequence[Sequence[int]]
    ) -> Combined:
        """Add up what the owners have found out about their tensors. Raises FleetError and NonFiniteError."""
        # One row: the stable ranks of all matrices, and of every member its products.
        findings = torch.cat((stable_ranks, torch.zeros(len(whole) * len(products), dtype=torch.float64)))
        by_member = findings[len(stable_ranks) :].view(len(whole), -1)
        by_member[members.local[0]] = self._reduce(products, dist.ReduceOp.SUM)
        spans = []
        for position, mine in enumerate(whole):
            places = [self._corrected.index(index) for index in mine if index in self._corrected]
            offset = len(stable_ranks) + position * len(products)
            spans.append([Span(0, 2 * place, 2 * place + 2) for place in places])
            spans[-1].append(Span(0, offset, offset + len(products)))
        together(self.fleet, partial(self._exchange(members, spans).from_owners, {0: findings}))

        square, *with_deltas = by_member.sum(0).tolist()
        if not math.isfinite(square):
            raise NonFiniteError("the averaged pseudo-gradient is non-finite")
        return Combined(
            products=[with_deltas[position] for position in members.local],
            norm=math.sqrt(square),
            stable_ranks=[(before, after) for before, after in findings[: len(stable_ranks)].view(-1, 2).tolist()],
        )

    def _counted_once(self, trained: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """(θ, θᵢ) of the tensors that this rank counts in a sum over its group."""
        for theta, theta_i in zip(self._reference, trained, strict=True):
            if counted_here(theta, self._group):
                yield theta, theta_i

    def _reduce(self, values: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        """Over the ranks of this group, in place."""
        if self._group is not None:
            dist.all_reduce(values, operation, group=self._group)
        return values
