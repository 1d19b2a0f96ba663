"""Healing moves a record and all tensors from a donor to a joiner, whatever the size of the buffers."""

from typing import Any

import pytest
import torch

from isoloco import healing
from isoloco.fleet import FleetError
from tests.unit.isoloco.thread_fleet import Fault, Network, ThreadFleet, run_threads

RECORD = {"round": 3, "text": "θ", "nested": {"list": [1, [2, 3]], "float": 0.1}}


def state(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((4, 5), (7,), (), (0, 3), (2, 3, 4))
    return [torch.randn(shape, generator=generator) for shape in shapes]


def heal(
    donor_state: list[torch.Tensor],
    joiner_state: list[torch.Tensor],
    bucket_size: int,
    fault: Fault = lambda verb: None,
) -> Any:
    """Donor 4 heals joiners 9 and 11, and 5 has nothing to do with it; what joiner 9 received."""
    network = Network()
    fleets = {4: ThreadFleet(network, 4), 5: ThreadFleet(network, 5), 9: ThreadFleet(network, 9, fault)}
    fleets[11] = ThreadFleet(network, 11)
    states = {4: donor_state, 5: donor_state, 9: joiner_state, 11: joiner_state}

    def member(replica_id: int) -> healing.Healing | None:
        fleet = fleets[replica_id]
        fleet.meet([{}])
        try:
            return healing.heal(fleet, {9: 4, 11: 4}, RECORD, states[replica_id], bucket_size)
        except FleetError:
            fleet.hang_up()
            raise

    results = run_threads({replica_id: lambda replica_id=replica_id: member(replica_id) for replica_id in fleets})
    assert results[4] is None
    assert results[5] is None
    assert results[11].donor == 4
    return results[9]


@pytest.mark.parametrize("bucket_size", [1, 5, 20, 1000])
def test_the_joiner_receives_the_donor_s_bits(bucket_size: int) -> None:
    received = heal(state(0), state(1), bucket_size)
    assert received.donor == 4
    assert received.record == RECORD
    assert len(received.tensors) == 5
    for mine, theirs in zip(received.tensors, state(0), strict=True):
        assert mine.shape == theirs.shape
        assert torch.equal(mine, theirs)


def test_the_joiner_s_own_tensors_are_not_touched() -> None:
    own = state(1)
    heal(state(0), own, 5)
    assert all(torch.equal(mine, before) for mine, before in zip(own, state(1), strict=True))


def test_bits_that_are_no_numbers_and_shards_that_are_not_contiguous_arrive_too() -> None:
    odd = torch.tensor([[float("nan"), -0.0, float("inf")], [1e-45, 2.0, 3.0]])
    received = heal([odd.T], [torch.zeros(2, 3).T], 4)
    assert received.tensors[0].shape == (3, 2)
    assert torch.equal(received.tensors[0].contiguous().view(torch.int32), odd.T.contiguous().view(torch.int32))


@pytest.mark.parametrize("nth", [1, 2, 3, 4])
def test_a_line_that_dies_on_the_way_is_a_fleet_error(nth: int) -> None:
    calls = []

    def fault(verb: str) -> str | None:
        calls.append(verb)
        return "fail" if calls.count("receive") == nth and verb == "receive" else None

    with pytest.raises(FleetError):
        heal(state(0), state(1), 20, fault)


def test_joiners_are_spread_over_the_donors() -> None:
    assert healing.donors([0, 3], [1, 2, 7]) == {1: 0, 2: 3, 7: 0}
    assert healing.donors([5], []) == {}
