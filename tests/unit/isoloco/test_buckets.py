"""Buckets cover every element exactly once, whatever the sizes and the capacity."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isoloco.buckets import Span, cut_into_buckets, num_elements, split_evenly, whole_spans

SIZES = st.lists(st.integers(0, 40), max_size=12)
CAPACITIES = st.integers(1, 60)


def elements(spans: list[Span]) -> list[tuple[int, int]]:
    """(tensor, element) of every element, in order."""
    return [(span.index, element) for span in spans for element in range(span.start, span.stop)]


@settings(deadline=None)
@given(SIZES, CAPACITIES)
def test_every_element_is_in_exactly_one_bucket_in_order(sizes: list[int], capacity: int) -> None:
    row = whole_spans(sizes)
    assert elements([span for bucket in cut_into_buckets(row, capacity) for span in bucket]) == elements(row)


@pytest.mark.parametrize(
    ("sizes", "capacity"),
    [([3, 3, 3], 4), ([10, 2], 4), ([5] * 100, 12)],
)
def test_tensors_that_do_not_fit_into_the_rest_of_a_bucket_are_not_left_out(sizes: list[int], capacity: int) -> None:
    buckets = list(cut_into_buckets(whole_spans(sizes), capacity))
    assert len(set(elements([span for bucket in buckets for span in bucket]))) == sum(sizes)


@settings(deadline=None)
@given(SIZES, CAPACITIES)
def test_buckets_are_full_but_for_the_last(sizes: list[int], capacity: int) -> None:
    buckets = list(cut_into_buckets(whole_spans(sizes), capacity))
    assert all(num_elements(bucket) == capacity for bucket in buckets[:-1])
    assert all(0 < num_elements(bucket) <= capacity for bucket in buckets)
    assert all(span.size > 0 for bucket in buckets for span in bucket)


def test_a_tensor_larger_than_a_bucket_is_spread_over_several() -> None:
    buckets = list(cut_into_buckets([Span(0, 0, 10)], 4))
    assert buckets == [[Span(0, 0, 4)], [Span(0, 4, 8)], [Span(0, 8, 10)]]


def test_a_row_may_leave_tensors_out_and_begin_inside_of_one() -> None:
    row = [Span(3, 5, 8), Span(1, 0, 2)]
    assert list(cut_into_buckets(row, 4)) == [[Span(3, 5, 8), Span(1, 0, 1)], [Span(1, 1, 2)]]
    assert whole_spans([4, 5, 6], [2, 0]) == [Span(2, 0, 6), Span(0, 0, 4)]


@settings(deadline=None)
@given(SIZES, st.integers(1, 9))
def test_even_parts_cover_everything_in_order_and_differ_by_one_element_at_most(sizes: list[int], parts: int) -> None:
    split = split_evenly(whole_spans(sizes), parts)
    assert len(split) == parts
    assert elements([span for part in split for span in part]) == elements(whole_spans(sizes))
    assert max(map(num_elements, split)) - min(map(num_elements, split)) <= 1


def test_nothing_to_cut_gives_no_bucket() -> None:
    assert list(cut_into_buckets([], 4)) == []
    assert list(cut_into_buckets(whole_spans([0, 0]), 4)) == []


def test_a_bucket_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one element"):
        list(cut_into_buckets([Span(0, 0, 3)], 0))
