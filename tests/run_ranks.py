"""Run one function on several ranks: real processes, real gloo. What a distributed test stands on."""

import os
import socket
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _rank_main(rank: int, world_size: int, port: int, function: Callable, arguments: tuple, results: Any) -> None:
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    try:
        results[rank] = ("value", function(*arguments))
    except BaseException:
        results[rank] = ("error", traceback.format_exc())
        raise
    finally:
        dist.destroy_process_group()


def run_ranks(world_size: int, function: Callable, *arguments: Any) -> list[Any]:
    """Call ``function(*arguments)`` on ``world_size`` gloo ranks and return what each one returned.

    ``function`` must be importable (defined at the top level of a test module); what it returns must pickle:
    plain numbers, strings, numpy arrays or CPU tensors. An exception on any rank is raised here with its traceback.
    """
    with mp.Manager() as manager:
        results = manager.dict()
        try:
            mp.spawn(
                _rank_main,
                args=(world_size, free_port(), function, arguments, results),
                nprocs=world_size,
                join=True,
            )
        except Exception as error:
            failures = [f"rank {rank}:\n{text}" for rank, (kind, text) in results.items() if kind == "error"]
            raise AssertionError("\n".join(failures) or str(error)) from error
        return [results[rank][1] for rank in range(world_size)]
