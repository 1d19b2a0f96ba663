"""The verbs of a fleet, on the fleets that need no network."""

import subprocess
import sys

import pytest
import torch

from isoloco.fleet import Member, SoloFleet, Transfer, VirtualFleet, agree_in_group, same_in_group, sum_in_order


def tensors(count: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(3, 4, generator=generator) for _ in range(count)]


def test_everybody_meets_sorted_by_number() -> None:
    meeting = VirtualFleet([10, 2]).meet([{"of": 2}, {"of": 10}])
    assert meeting.members == (Member(2, {"of": 2}), Member(10, {"of": 10}))
    assert meeting.local == (0, 1)
    assert meeting.connected


def test_a_meeting_wants_metadata_of_every_local_replica() -> None:
    with pytest.raises(ValueError, match=r"shorter|longer"):
        VirtualFleet([0, 1]).meet([{}])


def test_a_sum_adds_from_the_lowest_number_up_and_leaves_its_input_alone() -> None:
    values = [torch.tensor([1e8]), torch.tensor([1.0]), torch.tensor([-1e8])]
    copies = [value.clone() for value in values]
    assert sum_in_order(values).item() == 0.0, "fp32: (1e8 + 1) - 1e8"
    assert values == copies
    assert torch.equal(sum_in_order(tensors(3)), tensors(3)[0] + tensors(3)[1] + tensors(3)[2])


def test_owners_get_what_everybody_has_for_them_and_give_all_of_it_back() -> None:
    rows = [tensor.flatten() for tensor in tensors(3)]
    sizes = [5, 0, 7]  # the second one owns nothing
    fleet = VirtualFleet([0, 1, 2])
    received = fleet.to_owners(rows, sizes).wait()
    for parts, own in zip(received, (slice(0, 5), slice(5, 5), slice(5, 12)), strict=True):
        assert [part.tolist() for part in parts] == [row[own].tolist() for row in rows]
    back = fleet.from_owners([parts[1] for parts in received], sizes).wait()
    assert len(back) == 3
    assert all(torch.equal(row, rows[1]) for row in back)


def test_two_replicas_exchange_tensors_and_a_third_sits_it_out() -> None:
    a, b = tensors(2)
    into_0, into_2 = torch.zeros(3, 4), torch.zeros(3, 4)
    VirtualFleet([0, 1, 2]).transfer(
        [Transfer(2, send=a, receive=into_0), None, Transfer(0, send=b, receive=into_2)]
    ).wait()
    assert torch.equal(into_0, b)
    assert torch.equal(into_2, a)


def test_a_vote_is_what_was_said() -> None:
    fleet = VirtualFleet([0, 1])
    assert fleet.vote(True)
    assert not fleet.vote(False)
    assert not fleet.agree(False)


def test_a_solo_fleet_is_a_fleet_of_one_that_sends_nothing() -> None:
    fleet = SoloFleet(7)
    assert fleet.local_replica_ids == [7]
    (value,) = tensors(1)
    ((part,),) = fleet.to_owners([value.flatten()], [12]).wait()
    (row,) = fleet.from_owners([part], [12]).wait()
    assert torch.equal(row, value.flatten())
    assert (fleet.num_bytes_sent, fleet.num_bytes_received) == (0, 0)


@pytest.mark.parametrize("ids", [[], [1, 1]])
def test_replicas_have_different_numbers(ids: list[int]) -> None:
    with pytest.raises(ValueError, match="different replica ids"):
        VirtualFleet(ids)


def test_a_process_alone_agrees_with_itself() -> None:
    assert agree_in_group(True, None)
    assert not agree_in_group(False, None)
    assert same_in_group("value", None) == "value"


def test_importing_isoloco_loads_neither_torchft_nor_recipes() -> None:
    program = (
        "import sys, isoloco; from isoloco import OuterRound, VirtualFleet, SoloFleet; "
        "sys.exit(sum(name.split('.')[0] in ('torchft', 'recipes', 'torchdata') for name in sys.modules))"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
