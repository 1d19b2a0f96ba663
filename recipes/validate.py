"""Checks a recipe without starting anything: python -m recipes.validate [FILE] [--section.key VALUE ...]

Prints what the recipe means and exits with 0, or prints what is wrong with it, a line for each, and exits with 2.
"""

import os
import re
import sys
from collections.abc import Sequence

from recipes.check_recipe import quote, unused_keys
from recipes.config import Recipe, RecipeError, global_batch_size, ranks_per_group
from recipes.model_shape import FLAVORS, num_parameters
from recipes.recipe_file import DEBUG_RECIPE, config_hash, help_text, load_recipe, shown_path


def describe(recipe: Recipe, num_ranks: int | None = None) -> str:
    """What a recipe means for groups of `num_ranks` ranks, in a few lines."""
    training, inner, outer = recipe.training, recipe.optimizer, recipe.outer
    groups = recipe.fault_tolerance.num_replica_groups
    dp_shard, tp = ranks_per_group(recipe, num_ranks)
    batch = global_batch_size(recipe, dp_shard)
    rounds = -(-training.steps // outer.sync_steps)
    tokens = groups * batch * training.seq_len * training.steps
    return "\n".join(
        [
            f"  model   {recipe.model.flavor}: {num_parameters(FLAVORS[recipe.model.flavor]):,} parameters",
            f"  groups  {groups} of {dp_shard * tp} ranks each: FSDP {dp_shard} x TP {tp}",
            f"  batch   {batch} samples of {training.seq_len} tokens per group and step",
            f"  length  {training.steps} steps, {rounds} rounds of {outer.sync_steps}: {tokens:,} tokens",
            f"  inner   {inner.name}, lr {inner.lr}, weight decay {inner.weight_decay}",
            f"  outer   {outer.method}, lr {outer.lr}, momentum {outer.momentum}",
            f"  hash    {config_hash(recipe)}",
            *[f"  note    {line}" for line in unused_keys(recipe)],
        ]
    )


def ranks_from_environment() -> int | None:
    """NGPU as a number, None if it is not set. Raises RecipeError."""
    text = os.environ.get("NGPU", "")
    if not text:
        return None
    if not re.fullmatch(r"0*[1-9][0-9]{0,5}", text):
        raise RecipeError(f"NGPU = {quote(text)}: must be the number of ranks per group, at least 1")
    return int(text)


def main(arguments: Sequence[str]) -> int:
    if "--help" in arguments or "-h" in arguments:
        print(f"{(__doc__ or '').strip()}\n\n{help_text()}", end="")
        return 0
    named = bool(arguments) and not arguments[0].startswith("-")
    config_file, overrides = (arguments[0], arguments[1:]) if named else (None, arguments)
    try:
        description = describe(load_recipe(config_file, overrides), ranks_from_environment())
    except RecipeError as error:
        print(*error.problems, sep="\n", file=sys.stderr)
        return 2
    print(f"{config_file or shown_path(DEBUG_RECIPE)}: ok\n{description}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
