"""A 64-bit fingerprint of named tensors that does not depend on how they are sharded."""

import hashlib
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from isoloco.local_part import is_first_copy
from isoloco.shard_coordinates import shard_coordinates

# Elements mixed at a time: on the host so many that their 64-bit words stay in a core's cache, elsewhere so many that
# the device is busy.
_HOST_CHUNK = 1 << 16
_ACCELERATOR_CHUNK = 1 << 22

_WORD = 1 << 64


def _signed(word: int) -> int:
    """The int64 with the bits of an unsigned 64-bit integer: torch multiplies only signed ones (mod 2^64 as well)."""
    return word - _WORD if word >= _WORD // 2 else word


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MULTIPLIERS = (_signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB))


def _xor_with_upper_bits_(x: Tensor, shift: int) -> None:
    upper = x >> shift
    upper &= (1 << (64 - shift)) - 1  # >> repeats the sign bit; the mixer needs zeros there
    x ^= upper


def _mix_(x: Tensor) -> Tensor:
    """The splitmix64 finalizer, in place: a bijection of 64-bit words in which each bit of x moves half of them."""
    _xor_with_upper_bits_(x, 30)
    x *= _MULTIPLIERS[0]
    _xor_with_upper_bits_(x, 27)
    x *= _MULTIPLIERS[1]
    _xor_with_upper_bits_(x, 31)
    return x


def _partial_sum(name: str, local: Tensor, coordinates: list[Tensor], shape: torch.Size, device: torch.device) -> int:
    """Sum mod 2^64 of mix(name, flat index, fp32 bits) over ``local``, whose dim d holds ``coordinates[d]`` of it."""
    key = _signed(int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little"))
    strides = [1] * len(shape)
    for dim in reversed(range(len(shape) - 1)):
        strides[dim] = strides[dim + 1] * shape[dim + 1]

    # (rows, rest): flat index = row part + rest part
    row_part = coordinates[0] * strides[0] if coordinates else torch.zeros(1, dtype=torch.int64, device=device)
    rest_part = torch.zeros(1, dtype=torch.int64, device=device)
    for coordinate, stride in zip(coordinates[1:], strides[1:], strict=True):
        rest_part = (rest_part.unsqueeze(-1) + coordinate * stride).flatten()
    if local.numel() == 0:
        return 0
    local = local.unsqueeze(0) if local.dim() == 0 else local

    total = torch.zeros((), dtype=torch.int64, device=device)
    chunk = _HOST_CHUNK if device.type == "cpu" else _ACCELERATOR_CHUNK
    rows_per_chunk = max(1, chunk // rest_part.numel())
    for start in range(0, row_part.numel(), rows_per_chunk):
        rows = slice(start, start + rows_per_chunk)
        values = local[rows].to(device, torch.float32).contiguous().flatten()
        x = (row_part[rows].unsqueeze(-1) + rest_part).flatten()
        x *= _GOLDEN
        x += key
        x ^= values.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
        total += _mix_(x).sum()
    return int(total.item()) % _WORD


def counted_here(tensor: Tensor, group: dist.ProcessGroup | None) -> bool:
    """Whether this rank counts its part of a tensor in a sum over ``group`` in which every element counts once.

    Of the ranks that hold the same shard of a DTensor, the first one does; of a plain tensor, which is then the same on
    all ranks, the first rank of the group (None: this process alone). The mesh of a DTensor may be a part of the group
    (FSDP alone, beside matrices under FSDP and tensor parallelism): the other ranks then hold copies on meshes of their
    own, and the mesh with the first rank of the group (None: of the default group) counts.
    """
    if not isinstance(tensor, DTensor):
        return group is None or dist.get_rank(group) == 0
    mesh = tensor.device_mesh
    if mesh.get_coordinate() is None or dist.get_process_group_ranks(group)[0] not in mesh.mesh:
        return False
    return is_first_copy(tensor)


@torch.no_grad()
def digest(named_tensors: Iterable[tuple[str, Tensor]], group: dist.ProcessGroup | None = None) -> str:
    """16 hex digits: the sum mod 2^64 of mix(name, flat index, fp32 bits) over all elements, each counted once.

    Equal for the same tensors however they are sharded and in whatever order they come; different after any change of
    one bit. Tensors are of fp32 or a narrower float. With a DTensor among them this is a collective of one integer over
    ``group`` (None: the default group), the ranks that hold one copy of the model: plain tensors, and DTensors on a
    mesh of some of the ranks, are taken to be the same on all of it. Raises ValueError for other dtypes, a name given
    twice and unreduced (Partial) DTensors.
    """
    plain_sum = sharded_sum = 0
    mesh_device: str | None = None
    names: set[str] = set()
    for name, tensor in named_tensors:
        if name in names:
            raise ValueError(f"{name!r} is given twice: every tensor of a digest needs its own name")
        names.add(name)
        if not tensor.is_floating_point() or tensor.dtype == torch.float64:
            raise ValueError(f"{name!r} is {tensor.dtype}: a digest is over fp32 bits, and this does not fit in them")
        if not isinstance(tensor, DTensor):
            coordinates = [torch.arange(size, device=tensor.device) for size in tensor.shape]
            plain_sum += _partial_sum(name, tensor, coordinates, tensor.shape, tensor.device)
            continue

        mesh_device = tensor.device_mesh.device_type
        if any(placement.is_partial() for placement in tensor.placements):
            raise ValueError(f"{name!r} is placed as {tensor.placements}: reduce it before taking its digest")
        if counted_here(tensor, group):
            coordinates = shard_coordinates(tensor.shape, tensor.device_mesh, tensor.placements)
            device = coordinates[0].device if coordinates else tensor.to_local().device
            sharded_sum += _partial_sum(name, tensor.to_local(), coordinates, tensor.shape, device)

    if mesh_device is None:
        return f"{plain_sum % _WORD:016x}"
    here = sharded_sum + (plain_sum if dist.get_rank(group) == 0 else 0)
    total = torch.tensor(_signed(here % _WORD), dtype=torch.int64, device=mesh_device)
    dist.all_reduce(total, group=group)
    return f"{int(total.item()) % _WORD:016x}"
