"""The inner optimizer that a recipe names, and its state from the start."""

import pytest
import torch
from torch import nn

from isoloco.muon import Muon
from recipes.config import Optimizer
from recipes.inner_optimizer import build_inner_optimizer, reset_state, set_learning_rate
from recipes.model import Llama
from recipes.model_shape import ModelShape

SHAPE = ModelShape(vocab_size=32, dim=8, num_layers=2, num_heads=2, num_kv_heads=2, ffn_dim=12, max_seq_len=8)
IMPLEMENTATIONS = ("fused", "foreach", "for-loop")


def small_model() -> Llama:
    torch.manual_seed(0)
    return Llama(SHAPE)


def learn(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    for step in range(steps):
        tokens = torch.randint(0, SHAPE.vocab_size, (2, 8), generator=torch.Generator().manual_seed(step))
        model(tokens).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def equal(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def hidden(optimizer: torch.optim.Optimizer, model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if "momentum_buffer" in optimizer.state[parameter]}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_adamw_is_torchs(implementation) -> None:
    ours, theirs = small_model(), small_model()
    optimizer = build_inner_optimizer(ours, Optimizer(implementation=implementation))
    flags = {name: implementation == name for name in ("fused", "foreach")}
    reference = torch.optim.AdamW(theirs.parameters(), lr=8e-4, betas=(0.9, 0.95), weight_decay=0.1, **flags)
    learn(ours, optimizer)
    learn(theirs, reference)
    assert equal(ours, theirs)
    for mine, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert list(optimizer.state[mine]) == list(reference.state[expected])
        for key, value in reference.state[expected].items():
            assert optimizer.state[mine][key].dtype == value.dtype
            assert torch.equal(optimizer.state[mine][key], value)


def test_muon_orthogonalises_the_matrices_of_the_blocks_and_nothing_else() -> None:
    model = small_model()
    optimizer = build_inner_optimizer(model, Optimizer(name="Muon"))
    of_attention, of_feed_forward = ("wq", "wk", "wv", "wo"), ("w1", "w2", "w3")
    assert hidden(optimizer, model) == {
        f"layers.{layer}.{matrix}.weight"
        for layer in range(2)
        for matrix in (
            *(f"attention.{name}" for name in of_attention),
            *(f"feed_forward.{name}" for name in of_feed_forward),
        )
    }


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_muon_is_as_the_recipe_says(implementation) -> None:
    ours, theirs = small_model(), small_model()
    optimizer = build_inner_optimizer(
        ours,
        Optimizer(
            name="Muon",
            lr=0.03,
            beta1=0.8,
            beta2=0.9,
            eps=1e-6,
            weight_decay=0.2,
            implementation=implementation,
            momentum=0.7,
            nesterov=True,
            scale="original",
            coefficients="polar_express",
            adamw_lr_factor=0.5,
            adamw_parameters=["output.weight"],
        ),
    )
    reference = Muon(
        theirs.named_parameters(),
        lr=0.03,
        momentum=0.7,
        nesterov=True,
        weight_decay=0.2,
        scale="original",
        coefficients="polar_express",
        adamw=["output.weight"],
        adamw_betas=(0.8, 0.9),
        adamw_eps=1e-6,
        adamw_lr_factor=0.5,
        adamw_implementation=implementation,
    )
    assert "tok_embeddings.weight" in hidden(optimizer, ours)
    learn(ours, optimizer)
    learn(theirs, reference)
    assert equal(ours, theirs)


@pytest.mark.parametrize("name", ["AdamW", "Muon"])
def test_state_exists_from_the_start_for_all_that_is_trained(name) -> None:
    """Case B48: so that checkpoints are complete."""
    model = small_model()
    model.norm.weight.requires_grad_(False)
    optimizer = build_inner_optimizer(model, Optimizer(name=name))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert [parameter for parameter in model.parameters() if optimizer.state.get(parameter)] == trained


@pytest.mark.parametrize("name", ["AdamW", "Muon"])
def test_a_reset_optimizer_is_like_a_new_one(name) -> None:
    model, other = small_model(), small_model()
    optimizer = build_inner_optimizer(model, Optimizer(name=name))
    learn(model, optimizer)
    reset_state(optimizer)
    other.load_state_dict(model.state_dict())
    learn(model, optimizer)
    learn(other, build_inner_optimizer(other, Optimizer(name=name)))
    assert equal(model, other)


@pytest.mark.parametrize("name", ["AdamW", "Muon"])
def test_the_schedule_sets_the_rate_of_everything(name) -> None:
    model, before = small_model(), small_model()
    optimizer = build_inner_optimizer(model, Optimizer(name=name))
    set_learning_rate(optimizer, 0.0)
    learn(model, optimizer)
    assert equal(model, before)
