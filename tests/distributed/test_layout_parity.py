"""However a group's ranks share the model, it starts and trains alike: one rank, FSDP2, tensor parallel, both.

Numbers compare with one rank without a process group. The shapes do not divide evenly over FSDP2's ranks, every rank
has another number of valid tokens, and each step accumulates two micro-batches.
"""

import hashlib
import logging
import math
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from recipes.clip_gradients import clip_gradients
from recipes.config import Recipe
from recipes.init_weights import initial_value, initialize
from recipes.loss import IGNORE_INDEX, cross_entropy_sum, sum_over_data_parallel
from recipes.model import Llama
from recipes.model_shape import ModelShape
from recipes.parallelize import build_mesh, parallelize
from tests.run_ranks import run_ranks

pytestmark = pytest.mark.slow

# Over 2 (tp) x 2 (dp_shard) ranks: 250 -> 125 -> 63 + 62 rows of the vocabulary, 90 -> 45 -> 23 + 22 of the feed-forward.
SHAPE = ModelShape(vocab_size=250, dim=48, num_layers=3, num_heads=4, num_kv_heads=2, ffn_dim=90, max_seq_len=32)
SEED = 42
NUM_STEPS = 10
NUM_MICRO_BATCHES = 2
GLOBAL_BATCH = 8
LOSS_TOLERANCE = 1e-5  # absolute, in nats
NORM_TOLERANCE = 2e-4  # relative


@dataclass
class Run:
    """What one rank saw of a training run."""

    initial_digest: str = ""
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    placements: set[str] = field(default_factory=set)


def recipe_with(**settings: object) -> Recipe:
    """A float32 recipe; `section__key=value` changes one key."""
    recipe = Recipe()
    recipe.training.mixed_precision_param = "float32"
    for key, value in settings.items():
        section, name = key.split("__")
        assert hasattr(getattr(recipe, section), name)
        setattr(getattr(recipe, section), name, value)
    return recipe


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def digest_of(model: Llama) -> str:
    """Of all parameters, in order: equal if and only if they are equal bit for bit."""
    fingerprint = hashlib.sha256()
    for name, parameter in model.named_parameters():
        fingerprint.update(name.encode() + whole(parameter.detach()).numpy().tobytes())
    return fingerprint.hexdigest()


def global_batch(step: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels (8, 32), of which each sequence has another share of labels to ignore."""
    tokens = torch.randint(0, SHAPE.vocab_size, (GLOBAL_BATCH, 33), generator=torch.Generator().manual_seed(step))
    labels = tokens[:, 1:].clone()
    for index in range(GLOBAL_BATCH):
        labels[index, 32 - 4 * index :] = IGNORE_INDEX  # index 0: none; the last: 28 of 32
    return tokens[:, :-1], labels


def train(dp_shard: int, tp: int, recipe: Recipe, num_steps: int = NUM_STEPS) -> Run:
    """Ten AdamW steps, as the train loop does them."""
    # full_tensor of strided shards warns of its two all-gathers, once per process.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    mesh = build_mesh(dp_shard, tp, "cpu")
    with torch.device("meta"):
        model = Llama(SHAPE)
    parallelize(model, mesh, recipe)
    initialize(model, SEED, "cpu")
    run = Run(initial_digest=digest_of(model))
    run.placements = {str(getattr(parameter, "placements", "plain")) for parameter in model.parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    dp_rank = 0 if mesh is None else mesh.get_local_rank("dp_shard")
    for step in range(num_steps):
        tokens, labels = (
            part.view(dp_shard, NUM_MICRO_BATCHES, -1, 32)[dp_rank]  # (micro-batch, B, T)
            for part in global_batch(step)
        )
        num_tokens = sum_over_data_parallel((labels != IGNORE_INDEX).sum(), mesh)
        loss_sum = torch.zeros(())
        for index in range(NUM_MICRO_BATCHES):
            loss = cross_entropy_sum(model(tokens[index]), labels[index])
            (loss / num_tokens).backward()
            loss_sum += loss.detach()
        run.norms.append(clip_gradients(model.parameters(), 1.0, mesh).item())
        run.losses.append((sum_over_data_parallel(loss_sum, mesh) / num_tokens).item())
        optimizer.step()
        optimizer.zero_grad()
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    return run


def train_all(layouts: list[tuple[int, int]], recipes: list[Recipe]) -> list[Run]:
    """Several runs in one set of processes, which take longer to start than to train."""
    return [train(dp_shard, tp, recipe) for (dp_shard, tp), recipe in zip(layouts, recipes, strict=True)]


@pytest.fixture(scope="module")
def one_rank() -> Run:
    return train(1, 1, recipe_with())


def assert_alike(run: Run, expected: Run) -> None:
    assert len(run.losses) == len(expected.losses) == NUM_STEPS
    assert run.losses == pytest.approx(expected.losses, abs=LOSS_TOLERANCE, rel=0)
    assert run.norms == pytest.approx(expected.norms, rel=NORM_TOLERANCE)


def test_one_rank_starts_at_ln_v_and_learns_and_is_clipped(one_rank: Run) -> None:
    assert one_rank.losses[0] == pytest.approx(math.log(SHAPE.vocab_size), abs=0.1)
    assert min(one_rank.norms) > 1.0, "the norms would not show whether clipping works"
    assert len(set(one_rank.losses)) == NUM_STEPS
    assert one_rank.placements == {"plain"}


def test_two_ranks_train_like_one(one_rank: Run) -> None:
    settings = {
        (2, 1, "FSDP2"): recipe_with(),
        (1, 2, "tensor parallel"): recipe_with(),
        (2, 1, "FSDP2, everything resharded"): recipe_with(parallelism__fsdp_reshard_after_forward="always"),
        (2, 1, "FSDP2, nothing resharded"): recipe_with(parallelism__fsdp_reshard_after_forward="never"),
        (1, 2, "whole logits"): recipe_with(parallelism__disable_loss_parallel=True),
        (2, 1, "FSDP2, recomputed"): recipe_with(activation_checkpoint__mode="full"),
        (1, 2, "tensor parallel, half recomputed"): recipe_with(activation_checkpoint__mode="selective"),
    }
    layouts = [(dp_shard, tp) for dp_shard, tp, _ in settings]
    by_rank = run_ranks(2, train_all, layouts, list(settings.values()))
    assert by_rank[0] == by_rank[1], "the ranks of a group disagree about its loss or norm"
    for (_, tp, _), run in zip(settings, by_rank[0], strict=True):
        assert_alike(run, one_rank)
        assert run.initial_digest == one_rank.initial_digest
        expected = {"(Shard(dim=0),)"} if tp == 1 else {"(Shard(dim=0), Replicate())", "(Shard(dim=0), Shard(dim=1))"}
        assert expected <= run.placements


def test_four_ranks_with_both_train_like_one(one_rank: Run) -> None:
    by_rank = run_ranks(4, train, 2, 2, recipe_with())
    assert all(run == by_rank[0] for run in by_rank)
    assert_alike(by_rank[0], one_rank)
    assert by_rank[0].initial_digest == one_rank.initial_digest
    assert by_rank[0].placements == {
        "(_StridedShard(dim=0, sf=2), Shard(dim=0))",
        "(Shard(dim=0), Shard(dim=1))",
        "(Shard(dim=0), Replicate())",
    }


def test_bfloat16_computes_in_bfloat16_and_keeps_float32_parameters(one_rank: Run) -> None:
    recipe = recipe_with(training__mixed_precision_param="bfloat16")
    for run in run_ranks(1, train, 1, 1, recipe) + run_ranks(2, train, 1, 2, recipe):
        assert run.losses != one_rank.losses
        assert run.losses == pytest.approx(one_rank.losses, abs=5e-3, rel=0)
        assert run.norms == pytest.approx(one_rank.norms, rel=2e-2)


def test_bfloat16_without_a_process_group_is_refused() -> None:
    with torch.device("meta"):
        model = Llama(SHAPE)
    with pytest.raises(ValueError, match=r"training\.mixed_precision_param = 'bfloat16' needs a process group"):
        parallelize(model, None, recipe_with(training__mixed_precision_param="bfloat16"))


@pytest.mark.timeout(600)
def test_compiled_blocks_train_like_eager_ones(one_rank: Run) -> None:
    compiled = recipe_with(compile__enable=True)
    compiled_and_recomputed = recipe_with(compile__enable=True, activation_checkpoint__mode="selective")
    for runs in run_ranks(2, train_all, [(2, 1), (1, 2)], [compiled, compiled_and_recomputed]):
        for run in runs:
            assert_alike(run, one_rank)


def initial_shards_follow(dp_shard: int, tp: int) -> bool:
    """Whether this rank's shards, put together, are the values that each name stands for."""
    mesh = build_mesh(dp_shard, tp, "cpu")
    with torch.device("meta"):
        model = Llama(SHAPE)
    parallelize(model, mesh, recipe_with())
    initialize(model, SEED, "cpu")
    return all(
        torch.equal(whole(parameter.detach()), initial_value(name, parameter.shape, SEED))
        for name, parameter in model.named_parameters()
    )


def test_four_fsdp_ranks_hold_uneven_shards_of_the_same_model() -> None:
    assert all(run_ranks(4, initial_shards_follow, 4, 1))
