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


def test_sum_adds_from_the_lowest_number_up_and_leaves_its_input_alone() -> None:
    values = [torch.tensor([1e8]), torch.tensor([1.0]), torch.tensor([-1e8])]
    copies = [value.clone() for value in values]
    results = VirtualFleet([0, 1, 2]).sum(values).wait()
    assert [result.item() for result in results] == [0.0, 0.0, 0.0], "fp32: (1e8 + 1) - 1e8"
    assert values == copies
    assert torch.equal(sum_in_order(tensors(3)), tensors(3)[0] + tensors(3)[1] + tensors(3)[2])


def test_gather_gives_everybody_everything() -> None:
    values = tensors(2)
    results = VirtualFleet([0, 1]).gather(values).wait()
    assert len(results) == 2
    for everyone in results:
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(everyone, values, strict=True))


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
    assert torch.equal(fleet.sum([value]).wait()[0], value)
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
