"""The digest of whole tensors; how it is independent of sharding is shown in tests/distributed."""

import hashlib
import importlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isoloco.digest import digest

WORD = 2**64


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"matrix": (5, 7), "gain": (11,), "stack": (2, 3, 4), "scalar": (), "empty": (0, 3)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def reference_digest(named: dict[str, torch.Tensor]) -> str:
    """The definition, element by element, in Python's own integers."""
    total = 0
    for name, tensor in named.items():
        key = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
        for index, bits in enumerate(tensor.float().flatten().view(torch.int32).tolist()):
            x = ((index * 0x9E3779B97F4A7C15 + key) % WORD) ^ (bits % 2**32)
            x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % WORD
            x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % WORD
            total += x ^ (x >> 31)
    return f"{total % WORD:016x}"


def test_is_the_sum_of_mixed_words() -> None:
    """Independent of torch's integer arithmetic, so that other programs can recompute it."""
    assert digest(tensors().items()) == reference_digest(tensors())


def test_golden() -> None:
    """Digests are compared between versions of the program: the function must not drift."""
    named = {"weight": torch.arange(12, dtype=torch.float32).view(3, 4), "bias": torch.tensor([0.5, -0.25])}
    assert digest(named.items()) == "2ea246106b0ee0a2"
    assert digest({}.items()) == "0" * 16


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_every_single_bit_counts(data: st.DataObject) -> None:
    """Flipping any one bit of any element, sign and mantissa alike, changes the digest."""
    named = tensors()
    name = data.draw(st.sampled_from(["matrix", "gain", "stack", "scalar"]))
    words = named[name].view(-1).view(torch.int32)
    element = data.draw(st.integers(0, words.numel() - 1))
    bit = data.draw(st.integers(0, 31))
    words[element] ^= -(2**31) if bit == 31 else 1 << bit
    assert digest(named.items()) != digest(tensors().items())


def test_position_and_name_count() -> None:
    named = tensors()
    swapped = tensors()
    swapped["gain"][[0, 1]] = swapped["gain"][[1, 0]]
    renamed = {name.replace("gain", "again"): tensor for name, tensor in named.items()}
    exchanged = named | {"matrix": torch.zeros(5, 7), "other": named["matrix"]}
    zeros = {"matrix": torch.zeros(5, 7), "other": torch.zeros(5, 7)}
    digests = [digest(each.items()) for each in (named, swapped, renamed, exchanged, zeros)]
    assert len(set(digests)) == len(digests)
    assert digest([("a", torch.zeros(3))]) != digest([("a", torch.zeros(4))]), "zeros are elements too"


def test_order_and_memory_layout_do_not_count() -> None:
    named = tensors()
    assert digest(reversed(named.items())) == digest(named.items())
    strided = named | {"matrix": named["matrix"].T.contiguous().T}
    assert not strided["matrix"].is_contiguous()
    assert digest(strided.items()) == digest(named.items())


def test_chunks_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    named = {"long": torch.randn(1000), "wide": torch.randn(3, 500), "tall": torch.randn(500, 3)}
    expected = digest(named.items())
    for chunk in (1, 7, 400, 1 << 20):
        monkeypatch.setattr(importlib.import_module("isoloco.digest"), "_HOST_CHUNK", chunk)
        assert digest(named.items()) == expected


def test_narrow_floats_are_widened() -> None:
    tensor = torch.randn(9).bfloat16()
    assert digest([("a", tensor)]) == digest([("a", tensor.float())])


def test_input_is_not_changed() -> None:
    named = tensors()
    digest(named.items())
    assert all(torch.equal(named[name], tensor) for name, tensor in tensors().items())


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'a' is torch\.float64"):
        digest([("a", torch.zeros(2, dtype=torch.float64))])
    with pytest.raises(ValueError, match=r"'a' is torch\.int64"):
        digest([("a", torch.zeros(2, dtype=torch.int64))])
    with pytest.raises(ValueError, match="'a' is given twice"):
        digest([("a", torch.zeros(2)), ("a", torch.zeros(2))])
