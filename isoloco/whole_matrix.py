"""Bring a sharded matrix whole: the orthogonal factor of a shard is not the shard of the orthogonal factor."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


@torch.no_grad()
def apply_to_whole(matrix: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """``function`` of the whole matrix, with the kind, placement and device of ``matrix``.

    A plain tensor is whole already. Of a DTensor, every rank of its mesh gathers the full tensor, computes ``function``
    and keeps its own shard of the result without further communication, so ``function`` must be deterministic and keep
    the shape. Any placement but Partial (ValueError) will do: sharded along either dim or both, uneven, empty on some
    ranks, replicated. A local shard may live on the host while the mesh is on an accelerator: the work is done on the
    accelerator, the result returns to the host. A collective: all ranks of the mesh call it in the same order.
    """
    if not isinstance(matrix, DTensor):
        return function(matrix)
    mesh, placements = matrix.device_mesh, matrix.placements
    if any(placement.is_partial() for placement in placements):
        raise ValueError(f"a matrix placed as {placements} holds unsummed parts: reduce it first")

    on_mesh = matrix
    if matrix.to_local().device.type != mesh.device_type:
        # from_local moves the shard to the device of the mesh
        on_mesh = DTensor.from_local(
            matrix.to_local(), mesh, placements, run_check=False, shape=matrix.shape, stride=matrix.stride()
        )
    whole = function(on_mesh.full_tensor().contiguous())
    assert whole.shape == matrix.shape, f"{tuple(matrix.shape)} became {tuple(whole.shape)}"

    shard = distribute_tensor(whole, mesh, placements, src_data_rank=None).to_local()
    result: DTensor = torch.empty_like(matrix)  # type: ignore[assignment]
    result.to_local().copy_(shard)
    return result
