"""Which part of a DTensor this rank holds."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard


def shard_coordinates(shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]) -> list[Tensor]:
    """For each dim of a DTensor of ``shape``, which of its global coordinates this rank holds, on the mesh's device.

    Right for every placement but Partial, because torch itself cuts the coordinates as it cuts the tensor. No
    communication.
    """
    coordinates = []
    for dim, size in enumerate(shape):
        # The same placements on the coordinates of one dim alone: whatever cuts the tensor cuts them alike.
        along_dim: list[Placement] = []
        for placement in placements:
            if isinstance(placement, _StridedShard) and placement.dim == dim:
                along_dim.append(_StridedShard(0, split_factor=placement.split_factor))
            elif placement.is_shard(dim):
                along_dim.append(Shard(0))
            else:
                along_dim.append(Replicate())
        everywhere = torch.arange(size, device=mesh.device_type)
        coordinates.append(distribute_tensor(everywhere, mesh, along_dim, src_data_rank=None).to_local())
    return coordinates
