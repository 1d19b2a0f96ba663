"""Buckets cover every element exactly once, whatever the sizes and the capacity."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isoloco.buckets import cut_into_buckets, num_elements

SIZES = st.lists(st.integers(0, 40), max_size=12)
CAPACITIES = st.integers(1, 60)


def elements(sizes: list[int], capacity: int) -> list[tuple[int, int]]:
    """(tensor, element) of every element of every bucket, in order."""
    return [
        (piece.index, element)
        for bucket in cut_into_buckets(sizes, capacity)
        for piece in bucket
        for element in range(piece.start, piece.stop)
    ]


@settings(deadline=None)
@given(SIZES, CAPACITIES)
def test_every_element_is_in_exactly_one_bucket_in_order(sizes: list[int], capacity: int) -> None:
    expected = [(index, element) for index, size in enumerate(sizes) for element in range(size)]
    assert elements(sizes, capacity) == expected


@pytest.mark.parametrize(
    ("sizes", "capacity"),
    [([3, 3, 3], 4), ([10, 2], 4), ([5] * 100, 12)],
)
def test_tensors_that_do_not_fit_into_the_rest_of_a_bucket_are_not_left_out(sizes: list[int], capacity: int) -> None:
    assert len(set(elements(sizes, capacity))) == sum(sizes)


@settings(deadline=None)
@given(SIZES, CAPACITIES)
def test_buckets_are_full_but_for_the_last_and_their_pieces_lie_end_to_end(sizes: list[int], capacity: int) -> None:
    buckets = list(cut_into_buckets(sizes, capacity))
    assert all(num_elements(bucket) == capacity for bucket in buckets[:-1])
    for bucket in buckets:
        assert 0 < num_elements(bucket) <= capacity
        offset = 0
        for piece in bucket:
            assert piece.offset == offset
            assert piece.stop > piece.start
            offset += piece.stop - piece.start
        assert num_elements(bucket) == offset


def test_a_tensor_larger_than_a_bucket_is_spread_over_several() -> None:
    buckets = list(cut_into_buckets([10], 4))
    assert [(piece.start, piece.stop) for bucket in buckets for piece in bucket] == [(0, 4), (4, 8), (8, 10)]


def test_nothing_to_cut_gives_no_bucket() -> None:
    assert list(cut_into_buckets([], 4)) == []
    assert list(cut_into_buckets([0, 0], 4)) == []


def test_a_bucket_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one element"):
        list(cut_into_buckets([3], 0))
