"""The part of a tensor that lives on this rank: all of a plain tensor, the shard of a DTensor."""

from collections.abc import Iterator, Sequence

from torch import Tensor
from torch.distributed.tensor import DTensor

# On the host so many elements at a time that all operands of an update stay in a core's cache; elsewhere so many that
# the device is busy.
_HOST_CHUNK = 1 << 17
_ACCELERATOR_CHUNK = 1 << 24


def local_part(tensor: Tensor) -> Tensor:
    """What of a tensor is in this rank's memory. Shares that memory; without gradient history."""
    # to_local() would be differentiable, and wait for work that is under way
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local.detach()


def is_first_copy(tensor: DTensor) -> bool:
    """Whether this rank is the first of those on the tensor's mesh that hold the same part of it."""
    position = tensor.device_mesh.get_coordinate()
    assert position is not None, "this rank is not on the tensor's mesh"
    return all(
        coordinate == 0
        for coordinate, placement in zip(position, tensor.placements, strict=True)
        if placement.is_replicate()
    )


def with_local_part(tensor: Tensor, local: Tensor) -> Tensor:
    """``local`` as this rank's part of a tensor that is placed like ``tensor``; it may be on another device."""
    if not isinstance(tensor, DTensor):
        return local
    # DTensor.from_local would move the part to the mesh's device; outer state stays on the host.
    return DTensor(local, tensor._spec, requires_grad=False)


def is_finite(tensor: Tensor) -> bool:
    """Whether this rank's part of a tensor holds neither NaN nor Inf."""
    return all(bool(part.isfinite().all()) for (part,) in chunks(local_part(tensor)))


def chunks(*tensors: Tensor) -> Iterator[Sequence[Tensor]]:
    """Corresponding views of equally shaped plain tensors, a bounded number of elements at a time.

    What is computed chunk by chunk needs no temporary copies of whole tensors, and stays in the cache.
    """
    first = tensors[0]
    if first.dim() == 0:
        tensors = tuple(tensor.view(1) for tensor in tensors)
        first = tensors[0]
    limit = _HOST_CHUNK if first.device.type == "cpu" else _ACCELERATOR_CHUNK
    if all(tensor.is_contiguous() for tensor in tensors):
        tensors = tuple(tensor.view(-1) for tensor in tensors)
        first = tensors[0]
    num_rows = max(1, limit // max(1, first[:1].numel()))
    for start in range(0, first.size(0), num_rows):
        yield [tensor[start : start + num_rows] for tensor in tensors]
