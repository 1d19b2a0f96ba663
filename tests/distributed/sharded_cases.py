"""Sharded tensors that more than one test stands on: layouts, and matrices of every awkward kind."""

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

# (mesh shape, placement on each mesh axis)
Layout = tuple[tuple[int, ...], tuple[Placement, ...]]
LAYOUTS: dict[int, dict[str, Layout]] = {
    2: {
        "rows": ((2,), (Shard(0),)),  # FSDP2, or tensor parallel by columns of the layer
        "columns": ((2,), (Shard(1),)),  # tensor parallel by rows of the layer
        "replicated": ((2,), (Replicate(),)),
    },
    4: {
        "rows": ((4,), (Shard(0),)),
        "columns": ((4,), (Shard(1),)),
        "fsdp_and_columns": ((2, 2), (Shard(0), Shard(1))),
        "fsdp_and_rows": ((2, 2), (_StridedShard(0, split_factor=2), Shard(0))),
        "fsdp_and_replicated": ((2, 2), (Shard(0), Replicate())),
    },
}
WORLDS_AND_LAYOUTS = [(world_size, layout) for world_size, layouts in LAYOUTS.items() for layout in layouts]


def awkward_matrices(seed: int) -> dict[str, Tensor]:
    """Odd shapes, deficient, zero, tiny and huge ones, and a vector; Gaussian of this seed."""
    generator = torch.Generator().manual_seed(seed)

    def gaussian(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "tall": gaussian(96, 64),
        "wide": gaussian(64, 96),
        "square": gaussian(64, 64),
        "odd_rows": gaussian(65, 33),
        "few_rows": gaussian(3, 8),  # fewer rows than four ranks: empty shards
        "single_row": gaussian(1, 64),
        "deficient": gaussian(64, 5) @ gaussian(5, 48),
        "zero": torch.zeros(64, 48),
        "tiny": 1e-20 * gaussian(64, 48),
        "huge": 1e20 * gaussian(64, 48),
        "gain": gaussian(65),
    }


def shard(tensor: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> DTensor:
    # a vector has no columns to cut: tensor parallelism replicates it
    placements = tuple(
        Replicate() if isinstance(placement, Shard) and placement.dim >= tensor.dim() else placement
        for placement in placements
    )
    return distribute_tensor(tensor, mesh, placements, src_data_rank=None)
