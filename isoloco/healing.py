"""Healing: how a group that is behind receives the run's state from one that holds it.

Only what is equal on every donor travels: the reference parameters, the outer momentum, and a record (round, step,
ledger, the run's history). Inner optimizer state never does: it belongs to its replica.
Every rank of a joiner receives from the same donor group, so shards of different donors are never mixed.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from isoloco.buckets import cut_into_buckets, num_elements, whole_spans
from isoloco.fleet import Fleet, Transfer

logger = logging.getLogger("isoloco")


@dataclass(frozen=True)
class Healing:
    """What a joiner received and has not used yet."""

    donor: int
    record: Mapping[str, Any]
    tensors: Sequence[Tensor]


def donors(current: Sequence[int], behind: Sequence[int]) -> dict[int, int]:
    """Joiner -> donor (replica ids), spread evenly over the donors."""
    return {joiner: current[index % len(current)] for index, joiner in enumerate(behind)}


def heal(
    fleet: Fleet,
    donor_of: Mapping[int, int],  # joiner -> donor
    record: Mapping[str, Any],  # what joiners get beside the tensors, JSON-ready
    tensors: Sequence[Tensor],  # local fp32 shards: sent by donors; of a joiner only the shapes matter
    bucket_size: int,  # in elements
) -> Healing | None:
    """Send the state to the joiners that are ours to heal; what we received, if we are a joiner ourselves.

    All members of the meeting call it, also those that have nothing to do with it: after every bucket each hears of all
    others, so that nobody waits for longer than a bucket takes, however large the state is. Raises FleetError.
    """
    (replica_id,) = fleet.local_replica_ids  # replicas that share one process share one state
    joiners = [joiner for joiner, donor in donor_of.items() if donor == replica_id]
    donor = donor_of.get(replica_id)
    for joiner in joiners:
        logger.info("group %d: giving round %d to group %d", replica_id, record["round"], joiner)
        data = torch.frombuffer(bytearray(json.dumps(record).encode()), dtype=torch.uint8).to(fleet.device)
        fleet.transfer([Transfer(joiner, send=torch.tensor([len(data)], device=fleet.device))]).wait()
        fleet.transfer([Transfer(joiner, send=data)]).wait()
    received = None
    if donor is not None:
        logger.info("group %d: being healed by group %d", replica_id, donor)
        length = torch.zeros(1, dtype=torch.int64, device=fleet.device)
        fleet.transfer([Transfer(donor, receive=length)]).wait()
        data = torch.empty(int(length.item()), dtype=torch.uint8, device=fleet.device)
        fleet.transfer([Transfer(donor, receive=data)]).wait()
        into = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in tensors]
        received = Healing(donor, json.loads(bytes(data.tolist())), into)

    flats = [tensor.reshape(-1) for tensor in tensors] if joiners else []
    for bucket in cut_into_buckets(whole_spans([tensor.numel() for tensor in tensors]), bucket_size):
        if joiners:
            buffer = torch.cat([flats[span.index][span.start : span.stop] for span in bucket]).to(fleet.device)
            for joiner in joiners:
                fleet.transfer([Transfer(joiner, send=buffer)]).wait()
        if received is not None:
            buffer = torch.empty(num_elements(bucket), dtype=torch.float32, device=fleet.device)
            fleet.transfer([Transfer(received.donor, receive=buffer)]).wait()
            for span, part in zip(bucket, buffer.split([span.size for span in bucket]), strict=True):
                received.tensors[span.index].view(-1)[span.start : span.stop].copy_(part)
        fleet.work(lambda: None)
    return received
