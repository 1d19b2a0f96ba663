"""Which rank works on which matrices when, and what travels: from shapes and placements alone, once for each list."""

import hashlib
import itertools
import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement

from isoloco.owners import assign_owners, orthogonalization_cost
from isoloco.shard_coordinates import shard_coordinates


class Kind(NamedTuple):
    """All that a plan depends on of a job. Jobs of one kind are worked on in batches."""

    shape: torch.Size
    num_inputs: int
    dtype: torch.dtype
    output_dtype: torch.dtype
    device: torch.device  # where it is worked on
    mesh: DeviceMesh | None  # None: plain tensors
    placements: tuple[Placement, ...]
    local_shape: torch.Size
    key: Hashable

    @property
    def num_bytes(self) -> int:
        """Of the whole inputs or the whole output, whichever is more."""
        return self.shape.numel() * max(self.num_inputs * self.dtype.itemsize, self.output_dtype.itemsize)

    @property
    def cost(self) -> float:
        return orthogonalization_cost(self.shape)


# For each dim, the runs [start, stop) of consecutive coordinates that a rank holds: none, one or (strided) several.
Region = tuple[tuple[tuple[int, int], ...], ...]
Index = tuple[slice, ...]


@dataclass(frozen=True)
class Part:
    """What one rank holds of a matrix: a rectangle or, strided, several."""

    region: Region
    shape: tuple[int, ...] = field(compare=False)
    blocks: tuple[tuple[Index, Index], ...] = field(compare=False)  # of each: where in the matrix, where in the part


class Parcel(NamedTuple):
    """A tensor that travels."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Batch:
    """B jobs of one kind that their owner works on together."""

    kind: Kind
    numbers: list[int]  # of the jobs
    parts: list[Part]  # of each rank
    sources: list[int]  # ranks whose parts make up the matrices, no element twice
    receivers: list[list[int]]  # ranks other than the owner that get their part of the results; one list, one transfer

    def inputs_of(self, rank: int) -> Parcel:
        return Parcel((self.kind.num_inputs, len(self.numbers), *self.parts[rank].shape), self.kind.dtype)

    def results_of(self, rank: int) -> Parcel:
        return Parcel((len(self.numbers), *self.parts[rank].shape), self.kind.output_dtype)


@dataclass(frozen=True)
class Transfer:
    """An all-to-all as one rank sees it: what it sends to which ranks, and what it receives from which."""

    outgoing: dict[int, Parcel]
    incoming: dict[int, Parcel]


@dataclass(frozen=True)
class Wave:
    """What all ranks work on at the same time, each on one batch or on nothing, and what of it travels."""

    batches: dict[int, Batch]  # by owner
    gather: Transfer | None  # None: every owner holds its matrices whole
    returns: list[Transfer]


@dataclass(frozen=True)
class Plan:
    """What the ranks of one group do with the jobs that are sharded over it."""

    group: dist.ProcessGroup | None  # None: this process alone
    device: torch.device  # where the work is done, and what travels
    rank: int  # in the group
    num_ranks: int
    waves: list[Wave]


def make_plans(kinds: Sequence[Kind], bucket_bytes: int) -> list[Plan]:
    """One plan for each group of ranks that shares some of the jobs. A collective over each of these groups.

    ValueError, on all ranks, for Partial placements, for ranks that were given different jobs, and for ranks that hold
    something else than the placements say.
    """
    for kind in kinds:
        if any(placement.is_partial() for placement in kind.placements):
            raise ValueError(f"a matrix placed as {kind.placements} holds unsummed parts: reduce it first")
    groups: dict[DeviceMesh | None, dist.ProcessGroup | None] = {}
    numbers_of: dict[tuple[dist.ProcessGroup | None, torch.device], list[int]] = {}
    for number, kind in enumerate(kinds):
        if kind.mesh is not None and kind.mesh.get_coordinate() is None:
            continue  # other ranks have it
        if kind.mesh not in groups:
            groups[kind.mesh] = _group_of(kind.mesh)
        numbers_of.setdefault((groups[kind.mesh], kind.device), []).append(number)
    return [_make_plan(group, device, numbers, kinds, bucket_bytes) for (group, device), numbers in numbers_of.items()]


def _group_of(mesh: DeviceMesh | None) -> dist.ProcessGroup | None:
    if mesh is None or mesh.size() == 1:
        return None
    for dim in range(mesh.ndim):
        if mesh.size(dim) == mesh.size():
            return mesh.get_group(dim)
    if mesh.size() == dist.get_world_size():
        return dist.group.WORLD
    if mesh.mesh_dim_names is None:
        raise ValueError(f"{mesh} needs names for its dims (mesh_dim_names): without, its ranks have no common group")
    return mesh._flatten().get_group()


def _make_plan(
    group: dist.ProcessGroup | None,
    device: torch.device,
    numbers: list[int],
    kinds: Sequence[Kind],
    bucket_bytes: int,
) -> Plan:
    num_ranks, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
    parts = _exchange_parts(group, [kinds[number] for number in numbers])
    owners = assign_owners([kinds[number].cost for number in numbers], num_ranks)

    batches_of: list[list[tuple[Kind, list[int]]]] = []  # by owner
    for owner in range(num_ranks):
        by_kind: dict[Kind, list[int]] = {}
        for number, its_owner in zip(numbers, owners, strict=True):
            if its_owner == owner:
                by_kind.setdefault(kinds[number], []).append(number)
        batches = []
        for kind, same in by_kind.items():
            size = max(1, bucket_bytes // 2 // max(1, kind.num_bytes))
            batches += [(kind, same[start : start + size]) for start in range(0, len(same), size)]
        # The costliest first on every rank, so that what is worked on at the same time takes about the same time.
        batches_of.append(sorted(batches, key=lambda batch: -len(batch[1]) * batch[0].cost))

    waves = []
    for of_ranks in itertools.zip_longest(*batches_of):
        wave = {owner: batch for owner, batch in enumerate(of_ranks) if batch is not None}
        waves.append(_make_wave(_route(wave, parts, num_ranks, bucket_bytes), rank))
    return Plan(group, device, rank, num_ranks, waves)


def _route(
    wave: dict[int, tuple[Kind, list[int]]], parts: dict[Kind, list[Part]], num_ranks: int, bucket_bytes: int
) -> dict[int, Batch]:
    """Choose who sends what. Of several ranks that hold the same part one sends it, and all of them get it back."""
    batches: dict[int, Batch] = {}
    num_sent: Counter[int] = Counter()  # elements, by rank
    for owner, (kind, numbers) in wave.items():
        holders: dict[Part, list[int]] = {}
        for rank, part in enumerate(parts[kind]):
            if part.blocks:
                holders.setdefault(part, []).append(rank)
        sources: list[int] = []
        receivers: list[list[int]] = []
        for part, ranks in holders.items():
            source = owner if owner in ranks else min(ranks, key=lambda rank: (num_sent[rank], rank))
            sources.append(source)
            if source != owner:
                num_sent[source] += len(numbers) * math.prod(part.shape)
            # One copy in each transfer, so that it is no larger than the batch. Counting from the owner on makes
            # different owners serve different ranks at a time.
            others = sorted(set(ranks) - {owner}, key=lambda rank: (rank - owner) % num_ranks)
            receivers.extend([] for _ in range(len(others) - len(receivers)))
            for copy, rank in enumerate(others):
                receivers[copy].append(rank)
        batches[owner] = Batch(kind, numbers, parts[kind], sources, receivers)

    num_bytes: Counter[tuple[str, int]] = Counter()  # of all copies
    for owner, batch in batches.items():
        for rank in itertools.chain(*batch.receivers):
            num_bytes["from", owner] += batch.results_of(rank).num_bytes
            num_bytes["to", rank] += batch.results_of(rank).num_bytes
    if max(num_bytes.values(), default=0) > bucket_bytes // 2:
        return batches
    # they all fit into one transfer
    return {
        owner: replace(batch, receivers=[list(itertools.chain(*batch.receivers))]) for owner, batch in batches.items()
    }


def _make_wave(batches: dict[int, Batch], me: int) -> Wave:
    """What this rank sends and receives for the batches."""
    mine = batches.get(me)
    gather = Transfer(
        {owner: batch.inputs_of(me) for owner, batch in batches.items() if owner != me and me in batch.sources},
        {rank: mine.inputs_of(rank) for rank in mine.sources if rank != me} if mine is not None else {},
    )
    returns = []
    for turn in range(max(len(batch.receivers) for batch in batches.values())):
        receivers = {owner: batch.receivers[turn] for owner, batch in batches.items() if turn < len(batch.receivers)}
        if any(receivers.values()):
            returns.append(
                Transfer(
                    {rank: mine.results_of(rank) for rank in receivers.get(me, [])} if mine is not None else {},
                    {owner: batches[owner].results_of(me) for owner, ranks in receivers.items() if me in ranks},
                )
            )
    is_gathered = any(set(batch.sources) - {owner} for owner, batch in batches.items())
    return Wave(batches, gather if is_gathered else None, returns)


def _exchange_parts(group: dist.ProcessGroup | None, kinds: list[Kind]) -> dict[Kind, list[Part]]:
    """What each rank of the group holds of each kind."""
    distinct = list(dict.fromkeys(kinds))
    if group is None:
        return {kind: [_part(tuple(((0, size),) if size else () for size in kind.shape))] for kind in distinct}

    regions: dict[Any, Region] = {}
    for kind in distinct:
        assert kind.mesh is not None
        layout = kind.shape, kind.mesh, kind.placements
        if layout not in regions:
            coordinates = shard_coordinates(*layout)
            regions[layout] = tuple(_runs(along_dim.tolist()) for along_dim in coordinates)
    number_of = {kind: number for number, kind in enumerate(distinct)}
    described = [(*kind[:5], kind.mesh and kind.mesh.shape, kind.placements, number_of[kind]) for kind in kinds]
    mine = (
        hashlib.sha256(repr(described).encode()).hexdigest(),
        [tuple(kind.local_shape) for kind in distinct],
        [regions[kind.shape, kind.mesh, kind.placements] for kind in distinct],
    )
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)

    jobs_of, local_shapes_of, regions_of = zip(*everyone, strict=True)
    for rank, jobs in enumerate(jobs_of):
        if jobs != jobs_of[0]:
            raise ValueError(
                f"ranks 0 and {rank} of a group were given different matrices: all need the same, in the same order"
            )
    parts = {kind: [_part(regions[number]) for regions in regions_of] for number, kind in enumerate(distinct)}
    for number, kind in enumerate(distinct):
        for rank, (part, local_shapes) in enumerate(zip(parts[kind], local_shapes_of, strict=True)):
            if local_shapes[number] != part.shape:
                raise ValueError(
                    f"rank {rank} of a group holds {local_shapes[number]} of a tensor of shape {tuple(kind.shape)}: "
                    f"{kind.placements} means {part.shape}"
                )
    return parts


def _runs(coordinates: list[int]) -> tuple[tuple[int, int], ...]:
    """[4, 5, 6, 9] -> ((4, 7), (9, 10))"""
    starts = [place for place, at in enumerate(coordinates) if place == 0 or at != coordinates[place - 1] + 1]
    return tuple(
        (coordinates[start], coordinates[stop - 1] + 1)
        for start, stop in itertools.pairwise([*starts, len(coordinates)])
    )


def _part(region: Region) -> Part:
    shape = []
    # along each dim, of each run: where it is in the matrix, and where in the part
    along_dims: list[list[tuple[slice, slice]]] = []
    for runs in region:
        ends = [0, *itertools.accumulate(stop - start for start, stop in runs)]
        shape.append(ends[-1])
        along_dims.append([(slice(*run), slice(*at)) for run, at in zip(runs, itertools.pairwise(ends), strict=True)])
    blocks = tuple(
        (tuple(in_matrix for in_matrix, _ in block), tuple(in_part for _, in_part in block))
        for block in itertools.product(*along_dims)
    )
    return Part(region, tuple(shape), blocks)
