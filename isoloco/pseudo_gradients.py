"""Pseudo-gradients: what replicas have learned since they last agreed, and how it becomes one outer gradient.

The reference parameters θ and all that is computed here live on the host; the trained parameters θᵢ may be elsewhere.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from time import monotonic

import torch
import torch.distributed as dist
from torch import Tensor

from isoloco.aggregate import Aggregation
from isoloco.buckets import Span
from isoloco.digest import counted_here
from isoloco.exchange import Exchange, owned_spans, share_out
from isoloco.fleet import Fleet, sum_in_order, together
from isoloco.local_part import chunks, local_part, with_local_part
from isoloco.outer_optimizer import NonFiniteError, OuterOptimizer
from isoloco.whole_matrix import Job


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
        self._corrected = {self._names.index(name) for name in optimizer.split_sizes}
        self._merged = {i for i, theta in enumerate(self._reference) if aggregation.needs_every_delta(theta.shape)}

    def norms(self) -> list[float]:
        """‖Δᵢ‖ of every local replica over its whole group."""
        squares = torch.zeros(len(self._replicas), dtype=torch.float64)
        for index, trained in enumerate(self._replicas):
            for theta, theta_i in self._counted_once(trained):
                for ours, theirs in chunks(local_part(theta), local_part(theta_i)):
                    squares[index] += (ours - theirs.to(ours)).double().square().sum()
        return self._sum_over_group(squares).sqrt().tolist()

    def cosines(self, norms: Sequence[float]) -> list[float]:
        """cos(Δᵢ, Δ̄) of every local replica, Δ̄ being in ``θ.grad``. Raises NonFiniteError if Δ̄ is not finite."""
        sums = torch.zeros(1 + len(self._replicas), dtype=torch.float64)
        for index, trained in enumerate(self._replicas):
            for theta, theta_i in self._counted_once(trained):
                assert theta.grad is not None
                for ours, theirs, mean in chunks(local_part(theta), local_part(theta_i), local_part(theta.grad)):
                    wide = mean.double()
                    sums[1 + index] += (ours - theirs.to(ours)).double().mul_(wide).sum()
                    sums[0] += wide.square().sum() if index == 0 else 0
        square, *products = self._sum_over_group(sums).tolist()
        if not math.isfinite(square):
            raise NonFiniteError("the averaged pseudo-gradient is non-finite")
        return [
            product / (norm * math.sqrt(square)) if norm * square > 0 else 0.0
            for product, norm in zip(products, norms, strict=True)
        ]

    def combine(
        self,
        replica_ids: Sequence[int],  # of all members of the meeting, sorted
        weights: Sequence[float],  # of the members, 0 for those that do not count
        local: Sequence[int],  # positions of the members that live here
        *,
        round_number: int,
        seconds: dict[str, float],  # what "exchange" and "orthogonalize" take is added here
    ) -> list[tuple[float, float]]:
        """Put Δ̄ of every tensor, corrected, into ``θ.grad``; for ``target="update"`` the updates into the optimizer.

        Each tensor is summed and corrected by one of the members that count. Returns the stable rank before and after
        of every corrected matrix, the same everywhere. If the result is not finite, :meth:`cosines` says so in all
        groups. Raises FleetError, on all ranks of this group if on one.
        """
        counted = [position for position, weight in enumerate(weights) if weight > 0]
        whole, spans = self._share_out(counted, local, num_members=len(weights))
        gradients = {}
        for index, theta in enumerate(self._reference):
            theta.grad = with_local_part(theta, torch.zeros_like(local_part(theta)))
            gradients[index] = local_part(theta.grad).view(-1)

        with _timed(seconds, "exchange"):
            summed = [[span for span in mine if span.index not in self._merged] for mine in spans]
            together(self.fleet, partial(self._sum, self._exchange(summed, local), gradients, weights, local))
        if self._merged:
            self._merge(replica_ids, weights, local, whole, round_number=round_number, seconds=seconds)
        if self._optimizer.target == "update":
            with _timed(seconds, "exchange"):  # momentum takes in Δ̄, whatever becomes of the update
                together(self.fleet, partial(self._exchange(spans, local).from_owners, gradients))
        with _timed(seconds, "orthogonalize"):
            stable_ranks = self._correct([self._names[index] for position in local for index in whole[position]])
        with _timed(seconds, "exchange"):
            if self._optimizer.target == "update":
                updates = self._optimizer.updates([self._names[index] for index in sorted(self._corrected)])
                gradients = dict(zip(sorted(self._corrected), (local_part(u).view(-1) for u in updates), strict=True))
                spans = [[span for span in mine if span.index in self._corrected] for mine in spans]
            together(self.fleet, partial(self._exchange(spans, local).from_owners, gradients))
            together(self.fleet, partial(self._share_stable_ranks, stable_ranks, whole, local))
        return [(before, after) for before, after in stable_ranks.view(-1, 2).tolist()]

    # ---- its parts ----

    def _share_out(
        self, counted: Sequence[int], local: Sequence[int], *, num_members: int
    ) -> tuple[list[list[int]], list[list[Span]]]:
        """What every member owns: numbers of the tensors that must be whole, and elements of this rank's parts."""
        # Members that share a process share θ.grad as well: one owner among them is enough.
        owners = counted if len(local) == 1 else counted[:1]
        shapes = [theta.shape for theta in self._reference]
        sizes = [local_part(theta).numel() for theta in self._reference]
        shares = share_out(shapes, sorted(self._corrected | self._merged), len(owners))
        whole: list[list[int]] = [[] for _ in range(num_members)]
        spans: list[list[Span]] = [[] for _ in range(num_members)]
        for owner, mine, elements in zip(owners, shares, owned_spans(sizes, shares), strict=True):
            whole[owner], spans[owner] = mine, elements
        return whole, spans

    def _exchange(self, spans: Sequence[Sequence[Span]], local: Sequence[int]) -> Exchange:
        return Exchange(self.fleet, spans, local, bucket_bytes=self._bucket_bytes)

    def _delta(self, replica: int, span: Span, out: Tensor) -> Tensor:
        """Write Δᵢ of a span into ``out`` (elements,), fp32, and return it."""
        theta = local_part(self._reference[span.index]).view(-1)[span.start : span.stop]
        theta_i = local_part(self._replicas[replica][span.index]).reshape(-1)[span.start : span.stop]
        return torch.sub(theta, theta_i.to(theta), out=out)

    def _sum(
        self, exchange: Exchange, gradients: Mapping[int, Tensor], weights: Sequence[float], local: Sequence[int]
    ) -> None:
        """Σ wᵢ Δᵢ / Σ wᵢ of the spans that are owned here, into ``gradients``."""
        counted = [position for position, weight in enumerate(weights) if weight > 0]
        total = sum(weights)

        def contribute(replica: int, span: Span, out: Tensor) -> None:
            if (weight := weights[local[replica]]) > 0:
                self._delta(replica, span, out).mul_(weight)
            else:
                out.zero_()  # never 0·Δᵢ, which may be NaN

        def take(span: Span, parts: Sequence[Tensor]) -> None:
            mean = sum_in_order([parts[position] for position in counted]).div_(total)
            gradients[span.index][span.start : span.stop].copy_(mean)

        exchange.to_owners(contribute, take)

    def _merge(
        self,
        replica_ids: Sequence[int],
        weights: Sequence[float],
        local: Sequence[int],
        whole: Sequence[Sequence[int]],
        *,
        round_number: int,
        seconds: dict[str, float],
    ) -> None:
        """Let the owners merge the Δᵢ of the tensors of which the rule needs every one, into ``θ.grad``.

        As many tensors at a time as each owner has ranks: no rank ever holds more than one tensor of every member.
        """
        counted = [position for position, weight in enumerate(weights) if weight > 0]
        merged = [[index for index in mine if index in self._merged] for mine in whole]
        num_ranks = 1 if self._group is None else dist.get_world_size(self._group)

        def contribute(replica: int, span: Span, out: Tensor) -> None:
            if weights[local[replica]] > 0:
                self._delta(replica, span, out)
            else:
                out.zero_()

        for start in range(0, max(map(len, merged)), num_ranks):
            wave = [mine[start : start + num_ranks] for mine in merged]
            own = [index for position in local for index in wave[position]]
            deltas = {index: [torch.zeros_like(local_part(self._reference[index])) for _ in counted] for index in own}

            def take(span: Span, parts: Sequence[Tensor], deltas: dict[int, list[Tensor]] = deltas) -> None:
                for delta, position in zip(deltas[span.index], counted, strict=True):
                    delta.view(-1)[span.start : span.stop].copy_(parts[position])

            spans = [
                [Span(index, 0, local_part(self._reference[index]).numel()) for index in indices] for indices in wave
            ]
            with _timed(seconds, "exchange"):
                exchange = self._exchange(spans, local)
                together(self.fleet, partial(exchange.to_owners, contribute, take))

            def merge(numbers: list[int], stacks: list[Tensor], own: list[int] = own) -> Tensor:
                merged_tensors = [
                    self._aggregation.merge(
                        [stack[place] for stack in stacks],
                        weights=[weights[position] for position in counted],
                        replica_ids=[replica_ids[position] for position in counted],
                        name=self._names[own[number]],
                        round_number=round_number,
                    )
                    for place, number in enumerate(numbers)
                ]
                return torch.stack(merged_tensors)

            with _timed(seconds, "orthogonalize"):
                jobs = []
                for index in own:
                    theta = self._reference[index]
                    assert theta.grad is not None
                    jobs.append(Job(tuple(with_local_part(theta, delta) for delta in deltas[index]), theta.grad))
                self._optimizer.whole_matrices.apply(jobs, merge)

    def _correct(self, names: Sequence[str]) -> Tensor:
        """Correct the matrices among ``names``. (2·matrices,): the stable ranks of those worked on in this group."""
        order = sorted(self._corrected)
        stable_ranks = torch.zeros(2 * len(order))
        try:
            worked_on = self._optimizer.correct(names)
        except NonFiniteError:
            return stable_ranks  # the others must see it, too: it goes back to them as it is
        for name, pair in worked_on.items():
            place = order.index(self._names.index(name))
            stable_ranks[2 * place : 2 * place + 2] = torch.tensor(pair)
        return self._sum_over_group(stable_ranks)

    def _share_stable_ranks(self, stable_ranks: Tensor, whole: Sequence[Sequence[int]], local: Sequence[int]) -> None:
        """Fill in the stable ranks of the matrices that other members own."""
        order = sorted(self._corrected)
        places = [[order.index(index) for index in mine if index in self._corrected] for mine in whole]
        spans = [[Span(0, 2 * place, 2 * place + 2) for place in mine] for mine in places]
        self._exchange(spans, local).from_owners({0: stable_ranks})

    def _counted_once(self, trained: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """(θ, θᵢ) of the tensors that this rank counts in a sum over its group."""
        for theta, theta_i in zip(self._reference, trained, strict=True):
            if counted_here(theta, self._group):
                yield theta, theta_i

    def _sum_over_group(self, values: Tensor) -> Tensor:
        if self._group is not None:
            dist.all_reduce(values, group=self._group)
        return values


@contextmanager
def _timed(seconds: dict[str, float], key: str) -> Iterator[None]:
    started = monotonic()
    try:
        yield
    finally:
        seconds[key] += monotonic() - started
