"""How pseudo-gradients of many replicas become one: every element goes to the member that owns it, and back to all.

Each member sends every other one what that one owns, and every owner sends what it has made of it to all: together the
bytes of a ring all-reduce, though the owner sees every replica's numbers and may do with them what it likes. What
depends on the hardware (a matrix product, an SVD) is so computed once in the whole run, and all replicas get the same
bits.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, zip_longest

import torch
from torch import Tensor

from isoloco.buckets import Span, cut_into_buckets, num_elements, split_evenly, whole_spans
from isoloco.fleet import Fleet
from isoloco.owners import assign_owners, orthogonalization_cost


def share_out(shapes: Sequence[torch.Size], whole: Sequence[int], num_owners: int) -> list[list[int]]:
    """Which owner gets which of the tensors that must stay whole: numbers of tensors, the costliest first.

    ``shapes``: of all tensors, unsharded. Follows from the arguments alone, so every member computes the same.
    """
    costs = [orthogonalization_cost(shapes[index]) for index in whole]
    owners = assign_owners(costs, num_owners)
    owned: list[list[int]] = [[] for _ in range(num_owners)]
    for position in sorted(range(len(whole)), key=lambda position: (-costs[position], whole[position])):
        owned[owners[position]].append(whole[position])
    return owned


def owned_spans(sizes: Sequence[int], owned: Sequence[Sequence[int]]) -> list[list[Span]]:
    """What each owner owns of this rank's elements: its whole tensors, and an equal part of what need not be whole.

    ``sizes``: elements of every tensor on this rank.
    """
    taken = set(chain(*owned))
    rest = split_evenly(whole_spans(sizes, [i for i in range(len(sizes)) if i not in taken]), len(owned))
    return [whole_spans(sizes, mine) + others for mine, others in zip(owned, rest, strict=True)]


class Exchange:
    """One exchange between the members of a meeting, of flat tensors that all of them have alike.

    Args:
        fleet: whose members take part; all of them do, also those that own nothing.
        spans: per member what it owns.
        local: positions of the members that live here.
        bucket_bytes: what the buffers that travel, sent and received ones together, may take.
    """

    def __init__(
        self, fleet: Fleet, spans: Sequence[Sequence[Span]], local: Sequence[int], *, bucket_bytes: int
    ) -> None:
        self._fleet = fleet
        self._spans = spans
        self._local = local
        # A row is as long as what arrives, because an owner receives its part of it from every member. A fleet may copy
        # it into the order of its connections, and the owner needs room for what it makes of it: four rows in all.
        self._capacity = max(1, bucket_bytes // (4 * 4 * len(spans)))

    def to_owners(
        self,
        contribute: Callable[[int, Span, Tensor], None],
        take: Callable[[Span, Sequence[Tensor]], None],
    ) -> None:
        """Bring every member's numbers to their owners. Raises FleetError.

        ``contribute(index, span, out)`` writes the numbers of local replica ``index`` into ``out`` (elements,), fp32 on
        the host. ``take(span, parts)`` is given the numbers of all members, in replica order, for a span owned here.
        """
        for row_spans in self._rows():
            self._row_to_owners(row_spans, contribute, take)

    def _row_to_owners(
        self,
        row_spans: Sequence[Sequence[Span]],
        contribute: Callable[[int, Span, Tensor], None],
        take: Callable[[Span, Sequence[Tensor]], None],
    ) -> None:
        # A function of its own, so that its buffers are gone before those of the next row are made.
        sizes = [num_elements(spans) for spans in row_spans]
        rows = []
        for index in range(len(self._local)):
            row = torch.empty(sum(sizes), dtype=torch.float32)
            for span, part in _cut(row, list(chain(*row_spans))):
                contribute(index, span, part)
            rows.append(row.to(self._fleet.device))
        received = self._fleet.to_owners(rows, sizes).wait()
        for position, parts in zip(self._local, received, strict=True):
            for pieces in zip(*(_cut(part, row_spans[position]) for part in parts), strict=True):
                take(pieces[0][0], [piece for _, piece in pieces])

    def from_owners(self, tensors: Mapping[int, Tensor]) -> None:
        """Fill ``tensors`` (number -> flat, on the host) with what their owners have in theirs.

        Raises FleetError.
        """
        if len(self._local) == len(self._spans):
            return  # what lives in one process is in the same tensors already
        for row_spans in self._rows():
            self._row_from_owners(row_spans, tensors)

    def _row_from_owners(self, row_spans: Sequence[Sequence[Span]], tensors: Mapping[int, Tensor]) -> None:
        dtype = next(iter(tensors.values())).dtype
        parts = [
            torch.cat([tensors[span.index][span.start : span.stop] for span in row_spans[position]])
            if row_spans[position]
            else torch.empty(0, dtype=dtype)
            for position in self._local
        ]
        sizes = [num_elements(spans) for spans in row_spans]
        row = self._fleet.from_owners([part.to(self._fleet.device) for part in parts], sizes).wait()[0]
        for span, part in _cut(row, list(chain(*row_spans))):
            tensors[span.index][span.start : span.stop].copy_(part)

    def _rows(self) -> Iterator[list[list[Span]]]:
        """What travels at a time: a bucket of every owner's elements, so that all owners are busy alike."""
        buckets = [cut_into_buckets(spans, self._capacity) for spans in self._spans]
        for row in zip_longest(*buckets, fillvalue=[]):
            yield list(row)


def _cut(row: Tensor, spans: Sequence[Span]) -> Iterator[tuple[Span, Tensor]]:
    """The parts of a row in which the spans' elements lie, end to end."""
    return zip(spans, row.split([span.size for span in spans]), strict=True)
