"""Outer momentum through DCP: under the parameters' names, and loadable under another sharding."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from isoloco.digest import digest
from isoloco.outer_optimizer import OuterOptimizer
from tests.run_ranks import run_ranks

pytestmark = pytest.mark.slow

OPTIONS = {
    "flat": StateDictOptions(flatten_optimizer_state_dict=True),
    "nested": StateDictOptions(flatten_optimizer_state_dict=False),
}


def build(seed: int) -> tuple[nn.Module, OuterOptimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3))
    if dist.get_world_size() > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, OuterOptimizer(model.named_parameters(), lr=0.7, momentum=0.9, isotropic="svd")


def step(model: nn.Module, optimizer: OuterOptimizer, seed: int) -> str:
    """One outer step on a pseudo-gradient that all ranks see alike; the digest after it."""
    generator = torch.Generator().manual_seed(seed)
    loss = model(torch.randn(4, 5, generator=generator)).square().sum()
    loss.backward()
    for parameter in model.parameters():
        parameter.grad.copy_(parameter.detach() * seed)  # the same however the model is sharded
    optimizer.step()
    optimizer.zero_grad()
    named = {name: parameter.detach() for name, parameter in model.named_parameters()}
    named |= {f"momentum.{name}": optimizer.state[p]["momentum_buffer"] for name, p in model.named_parameters()}
    return digest(named.items())


def save(folder: str) -> dict[str, str]:
    told = {}
    for layout, options in OPTIONS.items():
        model, optimizer = build(seed=0)
        step(model, optimizer, seed=1)
        optimizer.param_groups[0]["lr"] = 0.5
        state = {"model": model.state_dict(), "outer": get_optimizer_state_dict(model, optimizer, options=options)}
        dcp.save(state, checkpoint_id=Path(folder) / layout)
        told[layout] = step(model, optimizer, seed=2)
    return told


def load(folder: str) -> dict[str, str]:
    told = {}
    for layout, options in OPTIONS.items():
        model, optimizer = build(seed=1)
        state = {"model": model.state_dict(), "outer": get_optimizer_state_dict(model, optimizer, options=options)}
        dcp.load(state, checkpoint_id=Path(folder) / layout)
        model.load_state_dict(state["model"])
        set_optimizer_state_dict(model, optimizer, state["outer"], options=options)
        assert optimizer.param_groups[0]["lr"] == 0.5
        told[layout] = step(model, optimizer, seed=2)
    return told


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_momentum_goes_on_under_another_sharding(tmp_path: Path, num_ranks: int) -> None:
    """B57, B75: saved by two ranks; the next step ends with the same bits in parameters and momentum."""
    saved = run_ranks(2, save, str(tmp_path))[0]
    assert run_ranks(num_ranks, load, str(tmp_path))[0] == saved


def step_with_a_gradient_missing_on_one_rank() -> str:
    model, optimizer = build(seed=0)
    model(torch.ones(2, 5)).sum().backward()
    if dist.get_rank() == 1:
        model[1].bias.grad = None
    try:
        optimizer.step()
    except ValueError as error:
        return str(error)
    return "no error"


def test_ranks_with_different_pseudo_gradients_all_learn_of_it() -> None:
    told = run_ranks(2, step_with_a_gradient_missing_on_one_rank)
    assert told == ["1.bias has a pseudo-gradient on some ranks and none on others: all need the same"] * 2
