"""The dataclasses of a recipe: defaults, the numbers that follow from them, and independence of torch."""

import subprocess
import sys
from typing import get_args

import pytest

from recipes.check_recipe import check_recipe
from recipes.config import (
    ISOTROPIC_METHODS,
    KEYS,
    MERGING_METHODS,
    METHOD_DEFAULTS,
    FaultTolerance,
    LRScheduler,
    Optimizer,
    Outer,
    Parallelism,
    Recipe,
    RecipeError,
    Training,
    flatten,
    global_batch_size,
    min_replica_groups,
    ranks_per_group,
    total_steps,
    warmup_steps,
)
from recipes.model_shape import FLAVORS, num_flops_per_token, num_parameters


def test_the_defaults_are_a_valid_recipe() -> None:
    check_recipe(Recipe())


@pytest.mark.parametrize(
    ("method", "lr", "momentum"),
    [
        ("isoloco", 1.8, 0.8),
        ("diloco", 0.7, 0.9),
        ("diloco_sgd", 1.6, 0.0),
        ("iso_c", 2.1, 0.0),
        ("iso_cts", 3.1, 0.0),
        ("tsv_m", 0.6, 0.0),
        ("ties", 0.7, 0.0),
        ("dare", 1.5, 0.0),
    ],
)
def test_an_outer_method_brings_its_own_learning_rate_and_momentum(method: str, lr: float, momentum: float) -> None:
    outer = Outer(method=method)  # type: ignore[arg-type]
    assert (outer.lr, outer.momentum) == (lr, momentum)


def test_outer_values_that_are_given_stand() -> None:
    outer = Outer(method="diloco", lr=1.0, momentum=0.0)
    assert (outer.lr, outer.momentum) == (1.0, 0.0)


@pytest.mark.parametrize(("name", "lr", "weight_decay"), [("AdamW", 8e-4, 0.1), ("Muon", 0.02, 0.01)])
def test_an_inner_optimizer_brings_its_own_learning_rate_and_decay(name: str, lr: float, weight_decay: float) -> None:
    optimizer = Optimizer(name=name)  # type: ignore[arg-type]
    assert (optimizer.lr, optimizer.weight_decay) == (lr, weight_decay)


def test_inner_values_that_are_given_stand() -> None:
    optimizer = Optimizer(name="Muon", lr=0.01, weight_decay=0.0)
    assert (optimizer.lr, optimizer.weight_decay) == (0.01, 0.0)


def test_the_published_shapes_have_the_published_sizes() -> None:
    assert num_parameters(FLAVORS["178M"]) == 177_622_016
    assert num_parameters(FLAVORS["512M"]) == 512_398_848
    assert num_parameters(FLAVORS["debug"]) == 1_901_696
    assert num_parameters(FLAVORS["1B"]) == pytest.approx(1e9, rel=0.05)


def test_flops_per_token_count_weights_and_attention() -> None:
    weights = 177_622_016 - 32000 * 1024  # without the embedding table
    attention = 12 * 9 * 1024 * 2048
    assert num_flops_per_token(FLAVORS["178M"], seq_len=2048) == 6 * weights + attention


def test_every_flavor_can_be_named_in_a_recipe_and_no_other() -> None:
    assert set(get_args(KEYS["model.flavor"])) == set(FLAVORS)


def test_warm_up_is_a_tenth_of_the_schedule_rounded_down() -> None:
    recipe = Recipe(lr_scheduler=LRScheduler(total_steps=6775), training=Training(steps=6750))
    assert (total_steps(recipe), warmup_steps(recipe)) == (6775, 677)
    recipe.lr_scheduler.total_steps = -1
    assert (total_steps(recipe), warmup_steps(recipe)) == (6750, 675)
    recipe.lr_scheduler.warmup_steps = 0
    assert warmup_steps(recipe) == 0


@pytest.mark.parametrize(("groups", "needed"), [(1, 1), (2, 1), (3, 2), (4, 3), (5, 3), (8, 5)])
def test_a_majority_of_three_or_more_groups_holds_a_round(groups: int, needed: int) -> None:
    assert min_replica_groups(Recipe(fault_tolerance=FaultTolerance(num_replica_groups=groups))) == needed


def test_a_given_minimum_of_groups_stands() -> None:
    assert min_replica_groups(Recipe(fault_tolerance=FaultTolerance(num_replica_groups=5, min_replica_size=1))) == 1


@pytest.mark.parametrize(
    ("shard", "tp", "num_ranks", "degrees"),
    [
        (-1, 1, None, (1, 1)),
        (-1, 2, None, (1, 2)),
        (2, 2, None, (2, 2)),
        (-1, 1, 4, (4, 1)),
        (-1, 2, 4, (2, 2)),
        (2, 2, 4, (2, 2)),
    ],
)
def test_ranks_are_arranged_as_fsdp_times_tp(
    shard: int, tp: int, num_ranks: int | None, degrees: tuple[int, int]
) -> None:
    recipe = Recipe(parallelism=Parallelism(data_parallel_shard_degree=shard, tensor_parallel_degree=tp))
    assert ranks_per_group(recipe, num_ranks) == degrees


@pytest.mark.parametrize(("shard", "tp", "num_ranks"), [(2, 1, 3), (2, 2, 2), (-1, 2, 3), (-1, 2, 0)])
def test_ranks_that_do_not_fit_the_degrees_are_refused(shard: int, tp: int, num_ranks: int) -> None:
    recipe = Recipe(parallelism=Parallelism(data_parallel_shard_degree=shard, tensor_parallel_degree=tp))
    with pytest.raises(RecipeError, match=rf"ranks per group, but there are {num_ranks}: change NGPU"):
        ranks_per_group(recipe, num_ranks)


def test_the_batch_of_a_group_is_split_over_its_ranks() -> None:
    recipe = Recipe(training=Training(local_batch_size=4))
    assert global_batch_size(recipe, dp_shard=2) == 8
    recipe.training.global_batch_size = 24
    assert global_batch_size(recipe, dp_shard=3) == 24
    with pytest.raises(RecipeError, match="24 is not a multiple of 16"):
        global_batch_size(recipe, dp_shard=4)


def test_flatten_names_every_key_once() -> None:
    values = flatten(Recipe())
    assert list(values) == list(KEYS)
    assert values["outer.sync_steps"] == 30
    assert values["training.dataset"] == "builtin"


def test_reading_a_recipe_does_not_load_torch() -> None:
    program = "import sys, recipes.validate; recipes.validate.main([]); print('torch' in sys.modules)"
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert output.splitlines()[-1] == "False"


def test_every_outer_method_has_its_own_numbers_and_one_way_to_average() -> None:
    assert list(METHOD_DEFAULTS) == list(get_args(KEYS["outer.method"]))
    assert not set(ISOTROPIC_METHODS) & set(MERGING_METHODS)
    assert {*ISOTROPIC_METHODS, *MERGING_METHODS} <= set(METHOD_DEFAULTS)
