"""This process's place in its replica group, and how it finds the other ranks."""

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist

from recipes.command_line import free_port
from recipes.config import Recipe, ranks_per_group


class LaunchError(ValueError):
    """The process was not started the way it has to be."""


@dataclass(frozen=True)
class Rank:
    """Where this process stands inside its replica group."""

    rank: int
    num_ranks: int
    device: torch.device
    control: dist.ProcessGroup  # gloo, for decisions and for tensors on the CPU
    background: dist.ProcessGroup  # gloo, for what a thread does while training goes on


def join_group(recipe: Recipe) -> Rank:
    """Meet the other ranks of this group, as torchrun's environment says; without torchrun, a group of one."""
    if "RANK" not in os.environ:
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        os.environ["MASTER_PORT"] = str(free_port())
    for variable in ("LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        if variable not in os.environ:
            raise LaunchError(
                f"{variable} is not set although RANK is: start the ranks with torchrun or ./run_train.sh"
            )
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    ranks_per_group(recipe, num_ranks)
    on_gpu = torch.cuda.is_available() and torch.cuda.device_count() > int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    return Rank(rank, num_ranks, device, dist.new_group(backend="gloo"), dist.new_group(backend="gloo"))
