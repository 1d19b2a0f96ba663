"""Work is divided evenly and by everyone alike: longest processing time first."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isoloco.owners import assign_owners, orthogonalization_cost

COSTS = st.lists(st.integers(0, 30).map(float), max_size=7)


def loads(costs: list[float], owners: list[int], num_owners: int) -> list[float]:
    return [sum(cost for cost, owner in zip(costs, owners, strict=True) if owner == each) for each in range(num_owners)]


def best_busiest(costs: list[float], num_owners: int) -> float:
    """The load of the busiest owner in the best of all divisions."""
    divisions = itertools.product(range(num_owners), repeat=len(costs))
    return min(max(loads(costs, list(owners), num_owners)) for owners in divisions)


@settings(deadline=None)
@given(COSTS, st.integers(1, 3))
def test_the_busiest_owner_has_at_most_four_thirds_of_the_best(costs: list[float], num_owners: int) -> None:
    """Graham's bound, 4/3 − 1/(3 · owners), against every possible division."""
    owners = assign_owners(costs, num_owners)
    assert all(0 <= owner < num_owners for owner in owners)
    bound = (4 / 3 - 1 / (3 * num_owners)) * best_busiest(costs, num_owners)
    assert max(loads(costs, owners, num_owners)) <= bound + 1e-9


def test_the_worst_case_of_the_bound() -> None:
    """Two of the threes belong together, but both owners have a large one before they see a small one."""
    costs = [3.0, 3.0, 2.0, 2.0, 2.0]
    assert loads(costs, assign_owners(costs, 2), 2) == [7, 5]
    assert best_busiest(costs, 2) == 6


@given(COSTS, st.integers(1, 3), st.randoms())
def test_loads_do_not_depend_on_the_order_of_the_items(costs: list[float], num_owners: int, random) -> None:
    shuffled = costs.copy()
    random.shuffle(shuffled)
    expected = loads(costs, assign_owners(costs, num_owners), num_owners)
    assert loads(shuffled, assign_owners(shuffled, num_owners), num_owners) == expected


def test_ties_go_to_the_earlier_item_and_the_lowest_owner() -> None:
    assert assign_owners([1.0] * 7, 3) == [0, 1, 2, 0, 1, 2, 0]
    assert assign_owners([1.0, 5.0, 1.0, 5.0], 2) == [0, 0, 1, 1]


def test_more_owners_than_items() -> None:
    assert assign_owners([2.0, 3.0], 4) == [1, 0]
    assert assign_owners([], 4) == []


def test_layers_of_a_transformer_are_dealt_out_evenly() -> None:
    """Embedding and head, and in each of 9 layers 4 square matrices and 3 of a feed-forward network."""
    shapes = [(32000, 1024)] * 2 + ([(1024, 1024)] * 4 + [(2688, 1024)] * 3) * 9
    costs = [orthogonalization_cost(shape) for shape in shapes]
    for num_owners in (2, 3, 4, 8):
        each = loads(costs, assign_owners(costs, num_owners), num_owners)
        largest = max(max(costs), sum(costs) / num_owners)
        assert max(each) <= 1.05 * largest, num_owners


def test_no_owners_and_costs_that_are_none_are_errors() -> None:
    with pytest.raises(ValueError, match="num_owners=0"):
        assign_owners([1.0], 0)
    for cost in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="finite and not negative"):
            assign_owners([1.0, cost], 2)


def test_cost_counts_the_multiplications_of_newton_schulz() -> None:
    assert orthogonalization_cost((2, 3)) == 15 * 4 * 3 + 5 * 8
    assert orthogonalization_cost((3, 2)) == orthogonalization_cost((2, 3)), "the smaller side is squared"
    assert orthogonalization_cost((7, 5, 3, 2)) == 35 * orthogonalization_cost((3, 2)), "so many matrices"
    assert orthogonalization_cost((4, 0)) == 0


def test_vectors_cost_their_elements() -> None:
    assert orthogonalization_cost((65,)) == 65
    assert orthogonalization_cost(()) == 1
