"""Every element goes to its owner and back to all, with the bytes of a ring all-reduce."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isoloco.buckets import Span, num_elements
from isoloco.exchange import Exchange, owned_spans, share_out
from isoloco.fleet import VirtualFleet, sum_in_order
from tests.unit.isoloco.thread_fleet import Network, ThreadFleet, run_threads

SIZES = [7, 12, 1, 20, 5]


def numbers(member: int) -> dict[int, torch.Tensor]:
    generator = torch.Generator().manual_seed(member)
    return {index: torch.randn(size, generator=generator) for index, size in enumerate(SIZES)}


def run(num_members: int, spans: list[list[Span]], bucket_bytes: int) -> dict[int, dict]:
    """Every member, a thread each, sums what it owns and gets back everything; what it has then, and its bytes."""
    network = Network()
    fleets = [ThreadFleet(network, member) for member in range(num_members)]

    def member(position: int) -> dict:
        fleet = fleets[position]
        fleet.meet([{}])
        exchange = Exchange(fleet, spans, [position], bucket_bytes=bucket_bytes)
        mine = numbers(position)
        sums = {index: torch.full((size,), torch.nan) for index, size in enumerate(SIZES)}

        def contribute(replica: int, span: Span, out: torch.Tensor) -> None:
            assert replica == 0
            out.copy_(mine[span.index][span.start : span.stop])

        def take(span: Span, parts: list[torch.Tensor]) -> None:
            sums[span.index][span.start : span.stop] = sum_in_order(parts)

        exchange.to_owners(contribute, take)
        owned = {index: (~values.isnan()).nonzero().flatten().tolist() for index, values in sums.items()}
        exchange.from_owners(sums)
        fleet.vote(True)
        return {"sums": sums, "owned": owned, "bytes": fleet.num_bytes_sent}

    return run_threads({position: lambda position=position: member(position) for position in range(num_members)})


@pytest.mark.parametrize("bucket_bytes", [1, 100, 10**6])
@pytest.mark.parametrize("num_members", [1, 2, 3, 4])
def test_all_members_get_the_ordered_sum_of_what_all_have(num_members: int, bucket_bytes: int) -> None:
    spans = owned_spans(SIZES, [[3], [1], [0, 2], []][:num_members])
    results = run(num_members, spans, bucket_bytes)
    for result in results.values():
        for index, values in result["sums"].items():
            expected = sum_in_order([numbers(member)[index] for member in range(num_members)])
            assert torch.equal(values, expected)


def test_a_tensor_that_must_be_whole_is_only_ever_at_its_owner() -> None:
    results = run(3, owned_spans(SIZES, [[3], [1], []]), bucket_bytes=100)
    assert [len(results[member]["owned"][3]) for member in range(3)] == [20, 0, 0]
    assert [len(results[member]["owned"][1]) for member in range(3)] == [0, 12, 0]


def test_members_that_own_nothing_take_part() -> None:
    spans = owned_spans(SIZES, [[3], [1]])
    results = run(3, [spans[0], [], spans[1]], bucket_bytes=100)
    assert all(
        torch.equal(results[member]["sums"][index], results[0]["sums"][index])
        for member in range(3)
        for index in range(len(SIZES))
    )


@pytest.mark.parametrize("num_members", [2, 3, 4])
def test_bytes_are_those_of_a_ring_all_reduce(num_members: int) -> None:
    """Of tensors that need not be whole exactly for everybody; of whole ones in sum, as they cannot be cut evenly."""
    total = 4 * sum(SIZES)
    even = run(num_members, owned_spans(SIZES, [[] for _ in range(num_members)]), bucket_bytes=100)
    for result in even.values():
        assert abs(result["bytes"] - 2 * (num_members - 1) * total / num_members) <= 4 * num_members
    whole = run(num_members, owned_spans(SIZES, [[3], [1], [0, 2], []][:num_members]), bucket_bytes=100)
    assert sum(result["bytes"] for result in whole.values()) == 2 * (num_members - 1) * total


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), max_size=12),
    st.integers(1, 5),
    st.data(),
)
def test_shares_cover_every_element_once(shapes: list[tuple[int, int]], num_owners: int, data: st.DataObject) -> None:
    whole = data.draw(st.sets(st.sampled_from(range(len(shapes))))) if shapes else set()
    owned = share_out([torch.Size(shape) for shape in shapes], sorted(whole), num_owners)
    assert sorted(index for mine in owned for index in mine) == sorted(whole)
    sizes = [rows * cols for rows, cols in shapes]
    spans = owned_spans(sizes, owned)
    covered = sorted((span.index, e) for mine in spans for span in mine for e in range(span.start, span.stop))
    assert covered == [(index, element) for index, size in enumerate(sizes) for element in range(size)]
    rest = [num_elements(mine) - sum(sizes[index] for index in its) for mine, its in zip(spans, owned, strict=True)]
    assert max(rest) - min(rest) <= 1, "what may be cut is shared evenly"


def test_the_costliest_matrices_are_spread_first() -> None:
    shapes = [torch.Size(shape) for shape in ((64, 64), (1000, 64), (64, 64), (1000, 64))]
    assert [sorted(mine) for mine in share_out(shapes, [0, 1, 2, 3], 2)] == [[0, 1], [2, 3]]


def test_replicas_of_one_process_exchange_without_copies() -> None:
    """What they share lies in one place: there is nothing to send back."""
    mine = [numbers(0), numbers(1)]
    sums = {index: torch.zeros(size) for index, size in enumerate(SIZES)}
    exchange = Exchange(VirtualFleet([0, 1]), [*owned_spans(SIZES, [[3, 1]]), []], [0, 1], bucket_bytes=64)

    def contribute(replica: int, span: Span, out: torch.Tensor) -> None:
        out.copy_(mine[replica][span.index][span.start : span.stop])

    def take(span: Span, parts: list[torch.Tensor]) -> None:
        sums[span.index][span.start : span.stop] = sum_in_order(parts)

    exchange.to_owners(contribute, take)
    exchange.from_owners(sums)
    for index, values in sums.items():
        assert torch.equal(values, mine[0][index] + mine[1][index])
