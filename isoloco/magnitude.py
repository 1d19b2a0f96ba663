"""The smallest entries of a large tensor, by magnitude and exactly so many."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Cut:
    """Which entries of a flat tensor stay: those above the ``threshold`` and, of those equal to it, the first ones."""

    threshold: float
    end_of_equal: int  # those at this index and later go

    def apply(self, values: Tensor, start: int) -> Tensor:
        """``values``, the entries from index ``start`` on, with zeros in place of those that go."""
        magnitude = values.abs()
        is_early = torch.arange(start, start + len(values), device=values.device) < self.end_of_equal
        stays = (magnitude > self.threshold) | ((magnitude == self.threshold) & is_early)
        return torch.where(stays, values, 0)


def cut_smallest(values: Tensor, number: int) -> Cut:
    """Drop the ``number`` smallest |entries| of a flat tensor without NaN; of equal ones, those with higher indices."""
    if number == 0:
        return Cut(-1.0, 0)
    magnitude = values.to(torch.promote_types(values.dtype, torch.float32)).abs()
    threshold = torch.kthvalue(magnitude, number).values
    num_equal_dropped = number - int((magnitude < threshold).sum())
    equal = (magnitude == threshold).nonzero().flatten()
    return Cut(threshold.item(), int(equal[-num_equal_dropped]))
