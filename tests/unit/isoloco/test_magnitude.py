"""Dropping the smallest entries of a tensor: exactly so many, and always the same ones."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isoloco.magnitude import cut_smallest

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def kept(values: torch.Tensor, number: int) -> list[int]:
    """The indices that stay when the smallest ``number`` go, found by sorting."""
    order = sorted(range(len(values)), key=lambda index: (-abs(values[index].item()), index))
    return sorted(order[: len(values) - number])


@settings(max_examples=100, deadline=None)
@given(
    values=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=40),
    number=st.integers(0, 39),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_as_if_sorted(values: list[float], number: int, dtype: torch.dtype) -> None:
    """Any floats, zeros, subnormals and equal ones among them; what stays, stays as it is."""
    tensor = torch.tensor(values, dtype=dtype)
    number = min(number, len(values) - 1)
    cut = cut_smallest(tensor, number)
    stay = torch.zeros(len(values), dtype=torch.bool)
    stay[kept(tensor, number)] = True
    assert torch.equal(cut.apply(tensor, 0), torch.where(stay, tensor, 0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("number", [0, 1, 10, 500, 999])
def test_exactly_so_many_go(dtype: torch.dtype, number: int) -> None:
    """Although half of the entries are equal, which in half precision is usual."""
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    values[::2] = torch.where(values[::2] > 0, 0.5, -0.5).to(dtype)
    cut = cut_smallest(values, number)
    in_parts = torch.cat(
        [cut.apply(part, start) for start, part in zip(range(0, 1000, 13), values.split(13), strict=True)]
    )
    assert int((in_parts == 0).sum()) == number
    assert in_parts.nonzero().flatten().tolist() == kept(values, number)
