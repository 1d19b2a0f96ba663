"""However a group's ranks share the model, it starts and trains alike: one rank, FSDP2, tensor parallel, both.

Numbers compare with one rank without a process group. The shapes do not divide evenly over FSDP2's ranks, every rank
has another number of valid tokens, and each step accumulates two micro-batches.
"""

import hashlib
import logging
import math
import shutil
from dataclasses import dataclass, field, replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from recipes.clip_gradients import clip_gradients
from recipes.config import Recipe
from recipes.init_weights import initialize
from recipes.inner_optimizer import build_inner_optimizer
from recipes.loss import IGNORE_INDEX, cross_entropy_sum, sum_over_data_parallel
from recipes.model import Llama
from recipes.model_shape import ModelShape
from recipes.parallelize import build_mesh, parallelize
from tests.run_ranks import run_ranks

pytestmark = pytest.mark.slow

# Over 2 (tp) x 2 (dp_shard) ranks: 250 -> 125 -> 63 + 62 rows of vocabulary, 90 -> 45 -> 23 + 22 of feed-forward.
SHAPE = ModelShape(vocab_size=250, dim=48, num_layers=3, num_heads=4, num_kv_heads=2, ffn_dim=90, max_seq_len=32)
SHALLOW = replace(SHAPE, num_layers=2)
SEED = 42
NUM_STEPS = 10
MAX_NORM = 0.5
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
    recipe.optimizer.lr = 1e-3
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


def train(dp_shard: int, tp: int, recipe: Recipe, shape: ModelShape = SHAPE) -> Run:
    """Ten steps, as the train loop does them."""
    # full_tensor of strided shards warns of its two all-gathers, once per process.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    mesh = build_mesh(dp_shard, tp, "cpu")
    with torch.device("meta"):
        model = Llama(shape)
    parallelize(model, mesh, recipe)
    initialize(model, SEED, "cpu")
    run = Run(initial_digest=digest_of(model))
    run.placements = {str(getattr(parameter, "placements", "plain")) for parameter in model.parameters()}
    optimizer = build_inner_optimizer(model, recipe.optimizer)
    dp_rank = 0 if mesh is None else mesh.get_local_rank("dp_shard")
    for step in range(NUM_STEPS):
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
        run.norms.append(clip_gradients(model.parameters(), MAX_NORM, mesh).item())
        run.losses.append((sum_over_data_parallel(loss_sum, mesh) / num_tokens).item())
        optimizer.step()
        optimizer.zero_grad()
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    return run


Setting = tuple[int, int, Recipe]  # dp_shard, tp, recipe

TWO_RANKS: dict[str, Setting] = {
    "FSDP2": (2, 1, recipe_with()),
    "FSDP2, everything resharded": (2, 1, recipe_with(parallelism__fsdp_reshard_after_forward="always")),
    "FSDP2, nothing resharded": (2, 1, recipe_with(parallelism__fsdp_reshard_after_forward="never")),
    "FSDP2, recomputed": (2, 1, recipe_with(activation_checkpoint__mode="full")),
    "TP": (1, 2, recipe_with()),
    "TP, whole logits": (1, 2, recipe_with(parallelism__disable_loss_parallel=True)),
    "TP, every second block recomputed": (1, 2, recipe_with(activation_checkpoint__mode="selective")),
}
FOUR_RANKS: dict[str, Setting] = {"FSDP2 x TP": (2, 2, recipe_with()), "FSDP2": (4, 1, recipe_with())}
MUON = recipe_with(optimizer__name="Muon", optimizer__lr=0.01)
BFLOAT16 = recipe_with(training__mixed_precision_param="bfloat16")


def train_each(settings: dict[str, Setting]) -> dict[str, Run]:
    return {name: train(dp_shard, tp, recipe) for name, (dp_shard, tp, recipe) in settings.items()}


def train_on_ranks(num_ranks: int, settings: dict[str, Setting]) -> dict[str, Run]:
    """All runs in one set of processes, which take longer to start than to train."""
    by_rank = run_ranks(num_ranks, train_each, settings)
    assert all(runs == by_rank[0] for runs in by_rank), "the ranks of a group disagree about its loss or norm"
    return by_rank[0]


@pytest.fixture(scope="module")
def one_rank() -> Run:
    return train(1, 1, recipe_with())


@pytest.fixture(scope="module")
def two_ranks() -> dict[str, Run]:
    bfloat16 = {"FSDP2, bfloat16": (2, 1, BFLOAT16), "TP, bfloat16": (1, 2, BFLOAT16)}
    muon = {"FSDP2, Muon": (2, 1, MUON), "TP, Muon": (1, 2, MUON)}
    return train_on_ranks(2, TWO_RANKS | bfloat16 | muon)


@pytest.fixture(scope="module")
def four_ranks() -> dict[str, Run]:
    return train_on_ranks(4, FOUR_RANKS | {"FSDP2 x TP, Muon": (2, 2, MUON)})


def assert_alike(run: Run, expected: Run) -> None:
    assert run.initial_digest == expected.initial_digest
    assert len(run.losses) == len(expected.losses) == NUM_STEPS
    assert run.losses == pytest.approx(expected.losses, abs=LOSS_TOLERANCE, rel=0)
    assert run.norms == pytest.approx(expected.norms, rel=NORM_TOLERANCE)


def test_one_rank_starts_at_ln_v_and_learns_and_is_clipped(one_rank: Run) -> None:
    assert one_rank.losses[0] == pytest.approx(math.log(SHAPE.vocab_size), abs=0.1)
    assert min(one_rank.norms) > MAX_NORM, "the norms would not show whether clipping works"
    assert len(set(one_rank.losses)) == NUM_STEPS
    assert one_rank.placements == {"plain"}


@pytest.mark.parametrize("name", TWO_RANKS)
def test_two_ranks_start_and_train_like_one(name: str, one_rank: Run, two_ranks: dict[str, Run]) -> None:
    assert_alike(two_ranks[name], one_rank)
    expected = {"(Shard(dim=0),)"} if name.startswith("FSDP2") else {"(Shard(dim=0), Shard(dim=1))"}
    assert expected <= two_ranks[name].placements


@pytest.mark.parametrize("name", FOUR_RANKS)
def test_four_ranks_start_and_train_like_one(name: str, one_rank: Run, four_ranks: dict[str, Run]) -> None:
    assert_alike(four_ranks[name], one_rank)


def test_muon_trains_alike_however_its_matrices_are_cut(
    one_rank: Run, two_ranks: dict[str, Run], four_ranks: dict[str, Run]
) -> None:
    """B68: it makes each matrix whole."""
    expected = train(1, 1, MUON)
    assert expected.losses[1:] != one_rank.losses[1:]
    for run in (two_ranks["FSDP2, Muon"], two_ranks["TP, Muon"], four_ranks["FSDP2 x TP, Muon"]):
        assert_alike(run, expected)


def test_every_parameter_is_sharded_over_the_data_parallel_ranks(four_ranks: dict[str, Run]) -> None:
    assert four_ranks["FSDP2 x TP"].placements == {
        "(_StridedShard(dim=0, sf=2), Shard(dim=0))",  # columns of a matrix of tensor parallelism
        "(Shard(dim=0), Shard(dim=1))",  # rows
        "(Shard(dim=0), Replicate())",  # norms
    }


def assert_close_in_bfloat16(run: Run, expected: Run) -> None:
    assert run.initial_digest == expected.initial_digest  # parameters are float32; train() checks it after the steps
    assert run.losses != expected.losses
    assert run.losses == pytest.approx(expected.losses, abs=5e-3, rel=0)
    assert run.norms == pytest.approx(expected.norms, rel=2e-2)


@pytest.mark.parametrize("name", ["FSDP2, bfloat16", "TP, bfloat16"])
def test_bfloat16_is_for_computing_only(name: str, one_rank: Run, two_ranks: dict[str, Run]) -> None:
    assert_close_in_bfloat16(two_ranks[name], one_rank)


def test_one_rank_with_a_process_group_computes_in_bfloat16_if_asked_to(one_rank: Run) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        low, full = train(1, 1, BFLOAT16), train(1, 1, recipe_with())
    finally:
        dist.destroy_process_group()
    assert_close_in_bfloat16(low, one_rank)
    assert full == one_rank, "one rank in float32 keeps plain tensors"


def test_bfloat16_without_a_process_group_is_refused() -> None:
    with torch.device("meta"):
        model = Llama(SHAPE)
    with pytest.raises(ValueError, match=r"training\.mixed_precision_param = 'bfloat16' needs a process group"):
        parallelize(model, None, BFLOAT16)


def train_compiled() -> Run:
    recipe = recipe_with(compile__enable=True, activation_checkpoint__mode="selective")
    return train(1, 2, recipe, SHALLOW)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler for a CPU")
def test_compiled_blocks_recomputed_or_not_train_like_eager_ones() -> None:
    for run in run_ranks(2, train_compiled):
        assert_alike(run, train(1, 1, recipe_with(), SHALLOW))
