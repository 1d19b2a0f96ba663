"""Gradient clipping by the true global norm of a replica group."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from isoloco.local_part import is_first_copy


def _counts_here(gradient: Tensor) -> bool:
    """Whether this rank's piece of a gradient enters the norm: of the ranks with the same piece, only the first."""
    if not isinstance(gradient, DTensor):
        return True
    assert not any(placement.is_partial() for placement in gradient.placements), "this gradient is not reduced yet"
    return is_first_copy(gradient)


@torch.no_grad()
def clip_gradients(parameters: Iterable[Tensor], max_norm: float, mesh: DeviceMesh | None) -> Tensor:
    """Scale all gradients in place so that their global 2-norm is at most `max_norm`; 0 only measures.

    Returns the norm before clipping: a 0-dim fp32 tensor on the gradients' device, the same on every rank of the group.
    The norm is that of the whole model: shards are added up over all axes of `mesh` (the one of `build_mesh`; None for
    plain tensors), and a replicated parameter counts once. If a gradient is not finite, neither is the norm, and what
    the gradients then hold is undefined: look at the norm before stepping. Parameters without a gradient are skipped,
    but there must be one with.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    pieces = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
    counted = [piece for piece, gradient in zip(pieces, gradients, strict=True) if _counts_here(gradient)]
    total = torch.zeros((), device=gradients[0].device)
    if counted:
        total += torch.stack(torch._foreach_norm(counted, 2, dtype=torch.float32)).square().sum()
    if mesh is not None:
        for group in mesh.get_all_groups():  # rows, then columns: the sum over the whole mesh
            dist.all_reduce(total, group=group)
    norm = total.sqrt()
    if max_norm > 0:
        # Always multiply, by 1 if need be: to look at the norm would make the host wait for the device.
        torch._foreach_mul_(pieces, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm
