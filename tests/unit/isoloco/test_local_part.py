"""Chunks cover tensors of any shape and strides, in memory order or not, and write through to them."""

import pytest
import torch

from isoloco import local_part as module
from isoloco.local_part import chunks, local_part, with_local_part


@pytest.mark.parametrize("shape", [(), (1,), (10,), (3, 7), (7, 1, 2), (0,), (4, 0)])
@pytest.mark.parametrize("transposed", [False, True])
def test_chunks_write_through_to_every_element(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], transposed: bool
) -> None:
    monkeypatch.setattr(module, "_HOST_CHUNK", 4)
    first = torch.zeros(shape)
    second = torch.randn(shape)
    if transposed and len(shape) > 1:
        first = torch.zeros(shape[::-1]).permute(*reversed(range(len(shape))))
    sizes = []
    for into, source in chunks(first, second):
        assert into.shape == source.shape
        into.copy_(source)
        sizes.append(into.numel())
    assert torch.equal(first, second)
    assert sum(sizes) == second.numel()
    if not transposed:
        assert all(size <= 4 for size in sizes)


def test_a_plain_tensor_is_its_own_part_without_history() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    part = local_part(parameter)
    assert not part.requires_grad
    part.fill_(1)
    assert parameter.tolist() == [1, 1, 1]
    assert with_local_part(parameter, part) is part
