"""Work on whole matrices that are sharded: the orthogonal factor of a shard is not the shard of the orthogonal factor.

Every matrix is brought whole to one rank, its owner, worked on there, and the shards of the result go back to the ranks
that hold them. Nothing is gathered everywhere and nothing is computed twice.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from isoloco.local_part import local_part
from isoloco.work_plan import Batch, Kind, Parcel, Plan, Transfer, Wave, make_plans

Function = Callable[[list[int], list[Tensor]], Tensor]

# Bytes. What one rank is sent starts at a multiple of it, as tensors of any dtype have to.
_ALIGNMENT = 16

_EACH = (slice(None),)  # of a stack: the same place in each matrix


@dataclass(frozen=True)
class Job:
    """Matrices of equal shape, dtype and placement that a function makes one matrix of, placed like them.

    ``inputs`` are plain tensors or DTensors of any dims. ``output``, which receives the result in place, may be of
    another dtype and may be one of the inputs. Only jobs of equal ``key`` (and shape, dtypes, placement) share a batch.
    """

    inputs: tuple[Tensor, ...]
    output: Tensor
    key: Hashable = None


class WholeMatrices:
    """Applies functions of whole matrices to sharded ones, each matrix on one rank of the mesh that it is sharded over.

    The owners are chosen by cost and from shapes alone (:mod:`isoloco.owners`). The work goes in waves: every owner
    gets one batch of matrices of equal shape, ``bucket_bytes / 2`` of them or a single matrix, works on it and returns
    the shards. So a rank holds the matrices of its batch, the results, and beside one of the two what is travelling to
    and from it, about a bucket. Who sends what is planned once for each list of shapes and placements.

    DTensors of any placement but Partial are worked on on the device type of their mesh, wherever their local part is;
    plain tensors on ``device`` (None: where they are), by every process for itself.

    ``agree``: when the function raises an exception on a rank, all ranks raise it, after one more tiny collective for
    every call. Without it only that rank raises, when everything has been sent; its results are NaN on the others.
    """

    def __init__(
        self, *, bucket_bytes: int = 256 * 2**20, device: torch.device | None = None, agree: bool = True
    ) -> None:
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes={bucket_bytes}: a bucket holds at least one byte")
        self.bucket_bytes = bucket_bytes
        self.device = device
        self.agree = agree
        self.num_matrices = 0
        """How many jobs this rank has worked on so far."""
        self.work = 0.0
        """The sum of their :func:`~isoloco.owners.orthogonalization_cost`."""
        self._plans: dict[tuple[Kind, ...], list[Plan]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_plans": {}}  # process groups cannot be copied, and plans are made anew

    @torch.no_grad()
    def apply(self, jobs: Sequence[Job], function: Function) -> None:
        """Write into the output of every job what ``function`` makes of its inputs.

        ``function`` is called on the owners, with the numbers of B jobs and, for each of the k inputs that they have, a
        stack (B, *shape) in the dtype of the inputs; it returns a stack (B, *shape), which is cast to the dtype of the
        outputs. The stacks are scratch: it may overwrite them or take them out of the list.

        A collective over the meshes of the DTensors: all their ranks give the same jobs in the same order. ValueError
        for inputs and outputs that do not fit together, for Partial ones, and for lists of jobs that differ between
        ranks when they are first seen. What ``function`` raises is raised when all is done, a ValueError as such and
        anything else as RuntimeError where ranks agree on it; outputs are of no use then.
        """
        kinds = tuple(_kind(number, job, self.device) for number, job in enumerate(jobs))
        plans = self._plans.get(kinds)
        if plans is None:
            plans = self._plans[kinds] = make_plans(kinds, self.bucket_bytes)

        worker = _Worker(function)
        for plan in plans:
            for wave in plan.waves:
                _work_through(wave, plan, jobs, worker)
        self.num_matrices += worker.num_matrices
        self.work += worker.work
        worker.raise_error([(plan.group, plan.device) for plan in plans if self.agree and plan.group is not None])


def apply_to_whole(matrix: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """``function`` of the whole matrix, with the kind, dtype, placement and device of ``matrix``.

    A plain tensor is whole already. Of a DTensor one rank of its mesh receives the whole, which is scratch, and calls
    ``function``, which keeps the shape; the result returns as shards (:class:`WholeMatrices`). A collective: all ranks
    of the mesh call it in the same order. Any placement but Partial (ValueError) will do. An exception of ``function``
    is raised on all of them.
    """
    if not isinstance(matrix, DTensor):
        return function(matrix)
    result = torch.empty_like(matrix)
    WholeMatrices().apply([Job((matrix,), result)], lambda _, stacks: function(stacks[0][0]).unsqueeze(0))
    return result


def _kind(number: int, job: Job, device: torch.device | None) -> Kind:
    if not job.inputs:
        raise ValueError(f"job {number} has no inputs: it needs at least one")
    first, output = job.inputs[0], job.output
    for other in (*job.inputs[1:], output):
        if _layout(other) != _layout(first) or (other is not output and other.dtype != first.dtype):
            raise ValueError(
                f"job {number}: inputs and output have one shape and placement, the inputs one dtype, got "
                f"{[(tuple(each.shape), each.dtype, _layout(each)[1:]) for each in (first, other)]}"
            )
    shape, mesh, placements = _layout(first)
    if mesh is not None:
        device = torch.device(mesh.device_type)
    elif device is None:
        device = first.device
    return Kind(
        shape=shape,
        num_inputs=len(job.inputs),
        dtype=first.dtype,
        output_dtype=output.dtype,
        device=device,
        mesh=mesh,
        placements=placements,
        local_shape=local_part(first).shape,
        key=job.key,
    )


def _layout(tensor: Tensor) -> tuple[torch.Size, DeviceMesh | None, tuple[Placement, ...]]:
    if isinstance(tensor, DTensor):
        return tensor.shape, tensor.device_mesh, tensor.placements
    return tensor.shape, None, ()


class _Worker:
    """Calls the function for one batch after the other and remembers what became of it."""

    def __init__(self, function: Function) -> None:
        self.function = function
        self.num_matrices = 0
        self.work = 0.0
        self.error: Exception | None = None
        self.failed_job = -1

    def __call__(self, batch: Batch, stacks: list[Tensor]) -> Tensor:
        """The results (B, *shape); NaN from the first exception on."""
        shape = (len(batch.numbers), *batch.kind.shape)
        if self.error is None:
            try:
                results = self.function(batch.numbers, stacks)
                assert results.shape == shape, f"{shape} became {tuple(results.shape)}"
            except Exception as error:
                self.error, self.failed_job = error, batch.numbers[0]
            else:
                self.num_matrices += len(batch.numbers)
                self.work += len(batch.numbers) * batch.kind.cost
                return results
        return torch.full((), torch.nan, device=batch.kind.device).expand(shape)

    def raise_error(self, groups: Sequence[tuple[dist.ProcessGroup, torch.device]]) -> None:
        """Raise the exception of this rank or, where there are ``groups`` to agree with, the one of the first job."""
        if not groups:
            if self.error is not None:
                raise self.error
            return
        failure: tuple[int, type[Exception], str] | None = None
        if isinstance(self.error, ValueError):
            failure = self.failed_job, ValueError, str(self.error)
        elif self.error is not None:
            failure = self.failed_job, RuntimeError, f"{type(self.error).__name__}: {self.error}"
        # The largest group last: it has the others' ranks among its own, and all of them learn what any of them knows.
        for group, device in sorted(groups, key=lambda each: dist.get_world_size(each[0])):
            has_failed = torch.tensor(int(failure is not None), device=device)
            dist.all_reduce(has_failed, dist.ReduceOp.MAX, group=group)
            if has_failed.item():
                failures: list[Any] = [None] * dist.get_world_size(group)
                dist.all_gather_object(failures, failure, group=group)
                failure = min((each for each in failures if each is not None), key=lambda each: each[0])
        if failure is not None:
            _, kind, message = failure
            raise kind(message) from self.error


def _work_through(wave: Wave, plan: Plan, jobs: Sequence[Job], worker: _Worker) -> None:
    """Bring each owner its batch, work on it, return the parts. Every buffer is let go as soon as it is used."""
    batch = wave.batches.get(plan.rank)
    received = {} if wave.gather is None else _exchange(_pack_inputs(wave, plan, jobs), wave.gather.incoming, plan)
    results = None
    if batch is not None:
        stacks = _whole_inputs(batch, received, plan, jobs)
        received.clear()
        results = worker(batch, stacks)
        stacks.clear()
        _keep_own_part(batch, results, plan, jobs)
    for transfer in wave.returns:
        sent = _pack_results(transfer, batch, results, plan)
        if transfer is wave.returns[-1]:
            results = None
        received = _exchange(sent, transfer.incoming, plan)
        del sent
        for owner, parts in received.items():  # (B, *part)
            for number, part in zip(wave.batches[owner].numbers, parts, strict=True):
                local_part(jobs[number].output).copy_(part)


def _pack_inputs(wave: Wave, plan: Plan, jobs: Sequence[Job]) -> "_Row":
    """This rank's parts of all inputs of the batch of each owner that needs them, (k, B, *part)."""
    assert wave.gather is not None
    row = _Row(wave.gather.outgoing, plan)
    for owner, parcel in row.tensors.items():
        for position, number in enumerate(wave.batches[owner].numbers):
            for index, tensor in enumerate(jobs[number].inputs):
                parcel[index, position].copy_(local_part(tensor))
    return row


def _whole_inputs(batch: Batch, received: dict[int, Tensor], plan: Plan, jobs: Sequence[Job]) -> list[Tensor]:
    """The k stacks (B, *shape) of the inputs of a batch, made of the parts that others sent and of this rank's own."""
    kind = batch.kind
    shape = (len(batch.numbers), *kind.shape)
    stacks = [torch.empty(shape, dtype=kind.dtype, device=kind.device) for _ in range(kind.num_inputs)]
    for index, stack in enumerate(stacks):
        for rank in batch.sources:
            for in_matrix, in_part in batch.parts[rank].blocks:
                if rank != plan.rank:
                    stack[_EACH + in_matrix].copy_(received[rank][index][_EACH + in_part])
                    continue
                for whole, number in zip(stack, batch.numbers, strict=True):
                    whole[in_matrix].copy_(local_part(jobs[number].inputs[index])[in_part])
    return stacks


def _keep_own_part(batch: Batch, results: Tensor, plan: Plan, jobs: Sequence[Job]) -> None:
    for in_matrix, in_part in batch.parts[plan.rank].blocks:
        for number, whole in zip(batch.numbers, results, strict=True):
            local_part(jobs[number].output)[in_part].copy_(whole[in_matrix])


def _pack_results(transfer: Transfer, batch: Batch | None, results: Tensor | None, plan: Plan) -> "_Row":
    """The parts of the results (B, *part) of each rank that gets its own in this transfer, in the outputs' dtype."""
    row = _Row(transfer.outgoing, plan)
    for rank, parcel in row.tensors.items():
        assert batch is not None
        assert results is not None
        for in_matrix, in_part in batch.parts[rank].blocks:
            parcel[_EACH + in_part].copy_(results[_EACH + in_matrix])
    return row


class _Row:
    """Room in one row of bytes for what goes to, or comes from, each rank."""

    def __init__(self, parcels: dict[int, Parcel], plan: Plan) -> None:
        self.sizes = [0] * plan.num_ranks
        for rank, parcel in parcels.items():
            self.sizes[rank] = -(-parcel.num_bytes // _ALIGNMENT) * _ALIGNMENT
        self.bytes = torch.empty(sum(self.sizes), dtype=torch.uint8, device=plan.device)
        pieces = self.bytes.split(self.sizes)
        self.tensors = {
            rank: pieces[rank][: parcel.num_bytes].view(parcel.dtype).view(parcel.shape)
            for rank, parcel in parcels.items()
        }


def _exchange(sent: _Row, incoming: dict[int, Parcel], plan: Plan) -> dict[int, Tensor]:
    """What other ranks send to this one. Bytes, because not every backend sends every dtype. ``sent`` is used up."""
    received = _Row(incoming, plan)
    dist.all_to_all_single(received.bytes, sent.bytes, received.sizes, sent.sizes, group=plan.group)
    # A backend may refer to it for a while, which would be memory at a time when whole matrices take theirs.
    sent.bytes.untyped_storage().resize_(0)
    return received.tensors
