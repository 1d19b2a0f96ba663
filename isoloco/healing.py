"""Healing: how a group that is behind receives the run's state from one that holds it.

Only what is equal on every donor travels: the reference parameters, the outer momentum, and a record (round, step,
ledger, the run's history). Inner optimizer state never does: it belongs to its replica.
Every rank of a joiner receives from the same donor group, so shards of different donors are never mixed.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from isoloco.buckets import cut_into_buckets, num_elements, whole_spans
from isoloco.fleet import Fleet, Transfer


@dataclass(frozen=True)
class Healing:
    """What a joiner received and has not used yet."""

    donor: int
    record: Mapping[str, Any]
    tensors: Sequence[Tensor]


def donors(current: Sequence[int], behind: Sequence[int]) -> dict[int, int]:
    """Joiner -> donor (replica ids), spread evenly over the donors."""
    return {joiner: current[index % len(current)] for index, joiner in enumerate(behind)}


def give(fleet: Fleet, joiner: int, record: Mapping[str, Any], tensors: Sequence[Tensor], bucket_size: int) -> None:
    """Send the state to a joiner. ``tensors``: local fp32 shards; ``bucket_size`` in elements. Raises FleetError."""
    data = torch.frombuffer(bytearray(json.dumps(record).encode()), dtype=torch.uint8).to(fleet.device)
    fleet.transfer([Transfer(joiner, send=torch.tensor([len(data)], device=fleet.device))]).wait()
    fleet.transfer([Transfer(joiner, send=data)]).wait()
    flats = [tensor.reshape(-1) for tensor in tensors]
    for bucket in cut_into_buckets(whole_spans([len(flat) for flat in flats]), bucket_size):
        buffer = torch.cat([flats[span.index][span.start : span.stop] for span in bucket]).to(fleet.device)
        fleet.transfer([Transfer(joiner, send=buffer)]).wait()


def receive(fleet: Fleet, donor: int, like: Sequence[Tensor], bucket_size: int) -> Healing:
    """Receive the state from a donor into new tensors shaped like ``like``. Raises FleetError."""
    length = torch.zeros(1, dtype=torch.int64, device=fleet.device)
    fleet.transfer([Transfer(donor, receive=length)]).wait()
    data = torch.empty(int(length.item()), dtype=torch.uint8, device=fleet.device)
    fleet.transfer([Transfer(donor, receive=data)]).wait()
    tensors = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in like]
    for bucket in cut_into_buckets(whole_spans([tensor.numel() for tensor in tensors]), bucket_size):
        buffer = torch.empty(num_elements(bucket), dtype=torch.float32, device=fleet.device)
        fleet.transfer([Transfer(donor, receive=buffer)]).wait()
        for span, part in zip(bucket, buffer.split([span.size for span in bucket]), strict=True):
            tensors[span.index].view(-1)[span.start : span.stop].copy_(part)
    return Healing(donor, json.loads(bytes(data.tolist())), tensors)
