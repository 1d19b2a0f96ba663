"""The smallest entries of a large tensor, by magnitude and exactly so many, without sorting or copying it."""

from dataclasses import dataclass

import torch
from torch import Tensor

_CHUNK = 2**22  # elements looked at at a time
_DIGIT_BITS = 16


@dataclass(frozen=True)
class Cut:
    """Which entries of a flat tensor stay: those above the ``threshold`` and, of those equal to it, the first ones."""

    threshold: float
    end_of_equal: int  # of those equal to it, the ones at this index and later go

    def apply(self, values: Tensor, start: int) -> Tensor:
        """``values``, the entries from index ``start`` on, with zeros in place of those that go."""
        magnitude = values.abs()
        stays = magnitude >= self.threshold
        late = max(0, self.end_of_equal - start)
        stays[late:] = magnitude[late:] > self.threshold
        return torch.where(stays, values, 0)


def cut_smallest(values: Tensor, number: int) -> Cut:
    """Drop the ``number`` smallest |entries| of a flat tensor without NaN; of equal ones, those with higher indices.

    The threshold is found digit by digit, 16 bits at a time: the bits of floats that are not negative sort like the
    numbers. So it takes two passes over the entries (four in fp64) and no memory to speak of.
    """
    if number == 0:
        return Cut(-1.0, 0)
    dtype = torch.promote_types(values.dtype, torch.float32)
    as_integer, width = (torch.int64, 64) if dtype == torch.float64 else (torch.int32, 32)
    known = 0  # the leading digits of the threshold
    to_drop = number  # of those that have these digits
    for shift in range(width - _DIGIT_BITS, -1, -_DIGIT_BITS):
        counts = torch.zeros(2**_DIGIT_BITS, dtype=torch.int64, device=values.device)
        for chunk in values.split(_CHUNK):
            bits = chunk.to(dtype).abs().view(as_integer)
            if shift + _DIGIT_BITS < width:
                bits = bits[(bits >> (shift + _DIGIT_BITS)) == known]
            counts += torch.bincount((bits >> shift) & (2**_DIGIT_BITS - 1), minlength=2**_DIGIT_BITS)
        up_to = counts.cumsum(0)
        digit = int(torch.searchsorted(up_to, to_drop))
        to_drop -= int(up_to[digit]) - int(counts[digit])
        known = known << _DIGIT_BITS | digit
    threshold = torch.tensor(known, dtype=as_integer).view(dtype).item()
    return Cut(threshold, _end_of_first(values, threshold, int(counts[digit]) - to_drop))


def _end_of_first(values: Tensor, magnitude: float, number: int) -> int:
    """The index behind the first ``number`` entries of this magnitude."""
    if number == 0:
        return 0
    start = 0
    for chunk in values.split(_CHUNK):
        found = (chunk.abs() == magnitude).nonzero()
        if number <= len(found):
            return start + int(found[number - 1]) + 1
        number -= len(found)
        start += len(chunk)
    raise AssertionError("there are fewer entries of this magnitude than were counted")
