"""Whether a recipe can be run: the type and range of each value, then what goes together with what."""

import difflib
import json
import math
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal, get_args, get_origin

from recipes.config import (
    ISOTROPIC_METHODS,
    KEYS,
    Limit,
    Recipe,
    RecipeError,
    flatten,
    global_batch_size,
    ranks_per_group,
)
from recipes.config import total_steps as schedule_length
from recipes.config import warmup_steps as schedule_warmup
from recipes.model_shape import FLAVORS, parameter_names

BUILTIN_TOKENIZERS = {"builtin:bpe4k": 4096, "builtin:bpe8k": 8192, "builtin:bpe16k": 16384}
"""Built-in tokenizer -> its vocabulary, special tokens included."""


def check_recipe(recipe: Recipe) -> None:
    """Raises RecipeError if a value is of a wrong type or out of range, or if values do not go together."""
    for key, value in flatten(recipe).items():
        try:
            check_value(value, KEYS[key])
        except ValueError as error:
            raise RecipeError(f"{key} = {quote(value)}: {error}", key) from None
    check_rounds(recipe)
    check_parameter_names(recipe)
    check_data(recipe)
    check_tokenizer(recipe)
    check_parallelism(recipe)


# --- One value ------------------------------------------------------------------------------------------------------


def quote(value: object) -> str:
    """`value` on one line, as TOML writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON's escapes are TOML's, which wants DEL escaped as well.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list):
        return f"[{', '.join(quote(element) for element in value)}]"
    return repr(value)


def nearest(name: str, names: Iterable[str]) -> list[str]:
    """The one of `names` that `name` was probably meant to be, or none."""
    spellings = {spelling.lower(): spelling for spelling in names}
    return [spellings[near] for near in difflib.get_close_matches(name.lower(), spellings, n=1, cutoff=0.55)]


def suggestion(near: list[str], known: Iterable[str] = ()) -> str:
    """The end of a message: which name was meant or, if that is unclear, which names are known."""
    if near:
        return f"; did you mean {' or '.join(near)}?"
    known = ", ".join(known)
    return f"; there are {known}" if known else ""


def split_type(hint: Any) -> tuple[Any, Limit | None]:
    """The plain type of a key and its limit, if it has one."""
    if get_origin(hint) is Annotated:
        kind, limit = get_args(hint)
        return kind, limit
    return hint, None


def choices(hint: Any) -> tuple[str, ...]:
    """The values of a key that has a closed list of them; () for all others."""
    return get_args(hint) if get_origin(hint) is Literal else ()


def check_value(value: object, hint: Any) -> Any:
    """`value` in the type that `hint` wants (an int may stand for a float). Raises ValueError: what it must be."""
    if options := choices(hint):
        if value not in options:
            near = nearest(quote(value), map(quote, options))
            raise ValueError(f"must be one of {', '.join(map(quote, options))}{suggestion(near)}")
        return value
    kind, limit = split_type(hint)
    value = check_type(value, kind)
    if limit is not None and not limit.holds(value):
        raise ValueError(f"must be {limit.says}")
    return value


def check_type(value: object, kind: Any) -> Any:
    if kind == list[str]:
        if not isinstance(value, list):
            raise ValueError("must be a list of strings")
        return [check_type(element, str) for element in value]
    if kind is str:
        if not isinstance(value, str):
            raise ValueError("must be a string")
        if any("\ud800" <= character <= "\udfff" for character in value):
            raise ValueError("holds bytes that are not UTF-8")
        return value
    if kind is bool:
        if not isinstance(value, bool):
            raise ValueError("must be true or false" + ", not a string" * isinstance(value, str))
        return value
    what = "a whole number" if kind is int else "a number"
    if isinstance(value, bool) or not isinstance(value, (int, kind)):
        raise ValueError(f"must be {what}" + ", not a string" * isinstance(value, str))
    if isinstance(value, int) and abs(value) >= 2**63:
        raise ValueError("must be less than 2**63")
    if not math.isfinite(value):
        raise ValueError("must be a finite number")
    return kind(value)


# --- What goes together ---------------------------------------------------------------------------------------------


def check_rounds(recipe: Recipe) -> None:
    steps, outer, fault_tolerance = recipe.training.steps, recipe.outer, recipe.fault_tolerance
    if steps < outer.sync_steps:
        raise RecipeError(
            f"training.steps = {steps} is less than outer.sync_steps = {outer.sync_steps}: "
            "train for one round at least",
            "training.steps",
            "outer.sync_steps",
        )
    warmup, length = schedule_warmup(recipe), schedule_length(recipe)
    if warmup > length:
        raise RecipeError(
            f"lr_scheduler.warmup_steps = {warmup} is more than the {length} steps of the schedule: "
            "lower it, or leave it out for a tenth of them",
            "lr_scheduler.warmup_steps",
            "lr_scheduler.total_steps",
            "training.steps",
        )
    if outer.clip and outer.orthogonalizer != "svd":
        raise RecipeError(
            f"outer.clip = {quote(outer.clip)} needs the singular values themselves: "
            'set outer.orthogonalizer = "svd", or leave clip out',
            "outer.clip",
            "outer.orthogonalizer",
        )
    if outer.clip and outer.scale != "mean":
        raise RecipeError(
            f"outer.clip = {quote(outer.clip)} clips at the mean singular value, not at outer.scale = "
            f'{quote(outer.scale)}: set outer.scale = "mean"',
            "outer.clip",
            "outer.scale",
        )
    if outer.method == "diloco_sgd" and outer.momentum != 0:
        raise RecipeError(
            f'outer.momentum = {outer.momentum}, but outer.method = "diloco_sgd" has none: use method = "diloco"',
            "outer.momentum",
            "outer.method",
        )
    smallest, groups = fault_tolerance.min_replica_size, fault_tolerance.num_replica_groups
    if smallest > groups:
        raise RecipeError(
            f"fault_tolerance.min_replica_size = {smallest} is more than "
            f"fault_tolerance.num_replica_groups = {groups}: no round could take place",
            "fault_tolerance.min_replica_size",
            "fault_tolerance.num_replica_groups",
        )


def check_parameter_names(recipe: Recipe) -> None:
    flavor, names = recipe.model.flavor, parameter_names(FLAVORS[recipe.model.flavor])
    for key, patterns in (
        ("outer.exclude", recipe.outer.exclude),
        ("optimizer.adamw_parameters", recipe.optimizer.adamw_parameters),
    ):
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise RecipeError(
                    f"{key}: {quote(pattern)} matches no parameter of model.flavor = {quote(flavor)}"
                    + suggestion(nearest(pattern, names), [*names[:3], "..."]),
                    key,
                    "model.flavor",
                )


def unused_keys(recipe: Recipe) -> list[str]:
    """A line for each key that was set and has no effect with the chosen optimizer and method."""
    optimizer, outer, defaults = recipe.optimizer, recipe.outer, flatten(Recipe())
    of_muon = ("momentum", "nesterov", "scale", "coefficients", "adamw_lr_factor", "adamw_parameters")
    of_isotropic = ("orthogonalizer", "coefficients", "scale", "clip", "target", "exclude")
    method = f"outer.method = {quote(outer.method)}"
    unused = {
        **({f"optimizer.{key}": 'optimizer.name = "AdamW"' for key in of_muon} if optimizer.name == "AdamW" else {}),
        **({f"outer.{key}": method for key in of_isotropic} if outer.method not in ISOTROPIC_METHODS else {}),
        **({"outer.sparsity": method} if outer.method not in ("ties", "dare") else {}),
        **({"outer.common_space_fraction": method} if outer.method != "iso_cts" else {}),
        **({"outer.momentum_kind": "outer.momentum = 0"} if outer.momentum == 0 else {}),
    }
    if outer.method in ISOTROPIC_METHODS and outer.orthogonalizer == "svd":
        unused["outer.coefficients"] = 'outer.orthogonalizer = "svd"'
    return [
        f"{key} = {quote(value)} has no effect with {unused[key]}"
        for key, value in flatten(recipe).items()
        if key in unused and value != defaults[key]
    ]


def check_data(recipe: Recipe) -> None:
    for section, source in (("training", recipe.training), ("validation", recipe.validation)):
        dataset, path = f"{section}.dataset", f"{section}.dataset_path"
        if source is recipe.validation and not recipe.validation.enable:
            continue
        if source.dataset == "text" and not source.dataset_path:
            raise RecipeError(
                f'{dataset} = "text" needs {path}: a file, folder or glob of .jsonl, .jsonl.gz or .txt', dataset, path
            )
        if source.dataset != "text" and source.dataset_path:
            raise RecipeError(
                f"{path} = {quote(source.dataset_path)} is not read with {dataset} = {quote(source.dataset)}: "
                f'set {dataset} = "text", or leave the path out',
                path,
                dataset,
            )


def check_tokenizer(recipe: Recipe) -> None:
    tokenizer, flavor = recipe.model.tokenizer_path, recipe.model.flavor
    if not tokenizer.startswith("builtin:"):
        return  # a file, whose vocabulary is known only once it is read
    if tokenizer not in BUILTIN_TOKENIZERS:
        raise RecipeError(
            f"model.tokenizer_path = {quote(tokenizer)}: no such built-in tokenizer"
            + suggestion(nearest(tokenizer, BUILTIN_TOKENIZERS), BUILTIN_TOKENIZERS),
            "model.tokenizer_path",
        )
    num_tokens, vocab_size = BUILTIN_TOKENIZERS[tokenizer], FLAVORS[flavor].vocab_size
    if num_tokens > vocab_size:
        raise RecipeError(
            f"model.tokenizer_path = {quote(tokenizer)} has {num_tokens} tokens, but model.flavor = {quote(flavor)} "
            f"has a vocabulary of {vocab_size}: use a smaller tokenizer or another flavor",
            "model.tokenizer_path",
            "model.flavor",
        )


def check_parallelism(recipe: Recipe) -> None:
    key, tp = "parallelism.tensor_parallel_degree", recipe.parallelism.tensor_parallel_degree
    flavor, shape = recipe.model.flavor, FLAVORS[recipe.model.flavor]
    for what, size in (
        ("attention heads", shape.num_heads),
        ("key-value heads", shape.num_kv_heads),
        ("hidden dimensions", shape.dim),
        ("feed-forward dimensions", shape.ffn_dim),
        ("vocabulary entries", shape.vocab_size),
    ):
        if size % tp:
            raise RecipeError(
                f"{key} = {tp} does not divide the {size} {what} of model.flavor = {quote(flavor)}", key, "model.flavor"
            )
    if recipe.training.seq_len % tp:
        raise RecipeError(
            f"{key} = {tp} does not divide training.seq_len = {recipe.training.seq_len}: "
            "sequence parallelism splits the tokens of a sample over the same ranks",
            key,
            "training.seq_len",
        )
    global_batch_size(recipe, ranks_per_group(recipe)[0])
