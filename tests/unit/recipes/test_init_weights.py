"""Initial values: all of them set, from the seed and the name alone."""

import ast
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from recipes.init_weights import initial_value, initialize
from recipes.loss import cross_entropy_sum
from recipes.model import Llama, rope_tables
from recipes.model_shape import FLAVORS, ModelShape

SHAPE = ModelShape(vocab_size=96, dim=64, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=128, max_seq_len=32)


@pytest.fixture
def nan_in_new_memory() -> Iterator[None]:
    """torch fills memory that nobody has written yet with NaN, so that what is left out shows."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(2).isnan().all(), "torch no longer fills new memory"
    yield
    torch.use_deterministic_algorithms(False)


def build(shape: ModelShape, seed: int) -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        model = Llama(shape)
    initialize(model, seed, "cpu")
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.usefixtures("nan_in_new_memory")
def test_every_parameter_and_table_gets_its_value() -> None:
    with torch.device("meta"):
        model = Llama(SHAPE)
    initialize(model, 42, "cpu")
    for name, parameter in model.named_parameters():
        assert parameter.device.type == "cpu"
        assert parameter.dtype == torch.float32
        assert parameter.requires_grad
        if parameter.dim() == 1:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
        else:
            assert parameter.isfinite().all(), name
            assert parameter.std().item() == pytest.approx(0.02, rel=0.05), name
            assert abs(parameter.mean().item()) < 5 * 0.02 / math.sqrt(parameter.numel()), name
    for table, expected in zip((model.rope_cos, model.rope_sin), rope_tables(SHAPE), strict=True):
        assert torch.equal(table, expected)


def test_the_same_seed_gives_the_same_model_and_another_seed_another() -> None:
    first, again, other = build(SHAPE, 1), build(SHAPE, 1), build(SHAPE, 2)
    for name, value in first.items():
        assert torch.equal(value, again[name])
        assert value.dim() == 1 or not torch.isclose(value, other[name]).all(dim=1).any(), name


def test_no_two_parameters_start_alike() -> None:
    values = build(SHAPE, 1)
    alike = [name for name in values if values[name].shape == (128, 64)]
    assert len(alike) == 2 * SHAPE.num_layers  # w1 and w3 of each block
    assert len({values[name].sum().item() for name in alike}) == len(alike)


def test_a_parameters_value_does_not_depend_on_the_rest_of_the_model() -> None:
    deeper, shallow = build(replace(SHAPE, num_layers=3), 1), build(SHAPE, 1)
    assert len(deeper) > len(shallow)
    assert all(torch.equal(deeper[name], value) for name, value in shallow.items())


def test_values_are_pinned_so_that_a_later_version_can_repeat_a_run() -> None:
    value = initial_value("output.weight", torch.Size((2, 2)), seed=42)
    steps = torch.tensor([[-11776, 150], [5520, -9505]], dtype=torch.float64)
    assert torch.equal(value, (steps * (0.02 / 2**14)).float())


PRINT_FINGERPRINT = """
import hashlib, torch
from recipes.init_weights import initial_value
values = initial_value("layers.0.attention.wq.weight", torch.Size((300, 301)), 42)
raw = torch.empty(300, 301).normal_(generator=torch.Generator().manual_seed(42))
print([hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for tensor in (values, raw)])
"""


def test_values_do_not_depend_on_the_instructions_of_the_processor() -> None:
    """torch without vector instructions stands for another processor: its own normal values differ there."""
    if torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("this processor has no vector instructions to do without")
    vectorised, plain = (
        ast.literal_eval(
            subprocess.run(
                [sys.executable, "-c", PRINT_FINGERPRINT],
                env=os.environ | capability,
                cwd=Path(__file__).parents[3],
                capture_output=True,
                text=True,
                check=True,
            ).stdout
        )
        for capability in ({}, {"ATEN_CPU_CAPABILITY": "default"})
    )
    assert vectorised[0] == plain[0]
    assert vectorised[1] != plain[1], "torch's own values agree, too: this shows nothing"


def test_initialising_does_not_touch_the_global_random_state() -> None:
    before = torch.get_rng_state()
    build(SHAPE, 1)
    assert torch.equal(before, torch.get_rng_state())


def test_the_first_loss_is_that_of_guessing() -> None:
    shape = FLAVORS["debug"]
    with torch.device("meta"):
        model = Llama(shape)
    initialize(model, 42, "cpu")
    tokens = torch.randint(0, shape.vocab_size, (2, 65), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        loss = cross_entropy_sum(model(tokens[:, :-1]), tokens[:, 1:]) / 128
    assert loss.item() == pytest.approx(math.log(shape.vocab_size), abs=0.1)
