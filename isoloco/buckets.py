"""Buckets: a list of tensors seen as one long row of elements, cut into pieces of bounded size."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Piece:
    """Elements ``[start, stop)`` of the flattened tensor number ``index``, at ``offset`` in their bucket."""

    index: int
    start: int
    stop: int
    offset: int


def cut_into_buckets(sizes: Sequence[int], capacity: int) -> Iterator[list[Piece]]:
    """Cut tensors of ``sizes`` elements into buckets of at most ``capacity`` elements (at least one).

    Every element of every tensor is in exactly one bucket; a tensor larger than a bucket is spread over several.
    """
    if capacity < 1:
        raise ValueError(f"a bucket must hold at least one element, got a capacity of {capacity}")
    bucket: list[Piece] = []
    used = 0
    for index, size in enumerate(sizes):
        start = 0
        while start < size:
            stop = min(size, start + capacity - used)
            bucket.append(Piece(index, start, stop, used))
            used += stop - start
            start = stop
            if used == capacity:
                yield bucket
                bucket, used = [], 0
    if bucket:
        yield bucket


def num_elements(bucket: Sequence[Piece]) -> int:
    """How many elements a bucket holds."""
    return bucket[-1].offset + bucket[-1].stop - bucket[-1].start
