"""Buckets: parts of many tensors seen as one long row of elements, cut into pieces of bounded size."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """Elements ``[start, stop)`` of the flattened tensor number ``index``."""

    index: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


def whole_spans(sizes: Sequence[int], indices: Iterable[int] | None = None) -> list[Span]:
    """One span for each tensor of ``sizes`` elements; of those in ``indices`` alone, in that order, if given."""
    return [Span(index, 0, sizes[index]) for index in (range(len(sizes)) if indices is None else indices)]


def split_evenly(spans: Sequence[Span], num_parts: int) -> list[list[Span]]:
    """Cut a row of spans into ``num_parts`` rows of equal length (up to one element), in order."""
    total = sum(span.size for span in spans)
    ends = [total * (part + 1) // num_parts for part in range(num_parts)]
    parts: list[list[Span]] = [[] for _ in ends]
    part = position = 0
    for span in spans:
        start = span.start
        while start < span.stop:
            while position == ends[part]:
                part += 1
            stop = min(span.stop, start + ends[part] - position)
            parts[part].append(Span(span.index, start, stop))
            position += stop - start
            start = stop
    return parts


def cut_into_buckets(spans: Iterable[Span], capacity: int) -> Iterator[list[Span]]:
    """Cut a row of spans into buckets of at most ``capacity`` elements (at least one).

    Every element of every span is in exactly one bucket, in order; a span larger than a bucket is spread over several.
    """
    if capacity < 1:
        raise ValueError(f"a bucket must hold at least one element, got a capacity of {capacity}")
    bucket: list[Span] = []
    used = 0
    for span in spans:
        start = span.start
        while start < span.stop:
            stop = min(span.stop, start + capacity - used)
            bucket.append(Span(span.index, start, stop))
            used += stop - start
            start = stop
            if used == capacity:
                yield bucket
                bucket, used = [], 0
    if bucket:
        yield bucket


def num_elements(spans: Iterable[Span]) -> int:
    """How many elements a bucket holds."""
    return sum(span.size for span in spans)
