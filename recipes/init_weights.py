"""Initial values that depend on the seed and on each parameter's name, and on nothing else.

DTensor's random number generator gives other weights for other layouts (on a CPU mesh even the same values to every
shard). Here each parameter's full tensor is drawn on the CPU from a generator of its own, and each rank keeps its shard
of it: 1, 2 and 4 ranks, FSDP2 and tensor parallel, CPU and GPU all start from the same model.
"""

import hashlib

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from recipes.model import Llama, rope_tables

INIT_STD = 0.02  # of every matrix, as in Hugging Face's LlamaConfig, which the IsoLoCo paper's models use
STEPS_PER_STD = 2**14


def initial_value(name: str, size: torch.Size, seed: int) -> Tensor:
    """The full fp32 CPU tensor that parameter `name` starts from: ones for a norm, else normal(0, 0.02).

    Normal values come out of logarithms and cosines, whose last bit differs between processors; replica groups on other
    hardware would start from another model. So they are drawn in fp64 and rounded to multiples of 0.02 / 2^14, which
    takes that bit away.
    """
    if len(size) == 1:
        return torch.ones(size)
    name_and_seed = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(name_and_seed[:8], "little", signed=True))
    draws = torch.empty(size, dtype=torch.float64, device="cpu").normal_(generator=generator)
    return draws.mul_(STEPS_PER_STD).round_().mul_(INIT_STD / STEPS_PER_STD).float()


@torch.no_grad()
def initialize(model: Llama, seed: int, device: torch.device | str) -> None:
    """Give a model built on the meta device (parallelised or not) memory on `device` and its initial values, in place.

    One full tensor is in memory at a time. No communication. The RoPE tables are computed anew.
    """
    model.to_empty(device=device)
    for name, parameter in model.named_parameters():
        full = initial_value(name, parameter.shape, seed)
        if isinstance(parameter, DTensor):
            # src_data_rank=None: every rank has drawn the same tensor, so nobody has to send it.
            full = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.copy_(full)
    for table, values in zip((model.rope_cos, model.rope_sin), rope_tables(model.shape, "cpu"), strict=True):
        table.copy_(values)
