"""Which parameters are matrices, and of which blocks: chosen by name and explicit metadata, never by guess."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from torch import Tensor

SplitSizes = tuple[int, ...] | None
"""Rows of the blocks that a matrix is made of (q|k|v, gate|up); None: it is one matrix."""


def named_tensors(named_parameters: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """The (name, tensor) pairs of ``module.named_parameters()``, each name once. ValueError for anything else."""
    named = list(named_parameters)
    for entry in named:
        is_pair = isinstance(entry, (tuple, list)) and len(entry) == 2
        if not (is_pair and isinstance(entry[0], str) and isinstance(entry[1], Tensor)):
            raise ValueError(
                f"expected (name, parameter) pairs, got a {type(entry).__name__}: pass model.named_parameters(), "
                "because what is done to a parameter depends on its name"
            )
    if len({name for name, _ in named}) != len(named):
        raise ValueError("a parameter name is given twice: every parameter needs its own")
    return named


def matching_names(names: Sequence[str], patterns: Sequence[str], *, option: str) -> set[str]:
    """The ``names`` that equal or match (as file-name patterns: ``*``, ``?``, ``[...]``) one of ``patterns``.

    A pattern without any match is a mistake, and a silent one would train something else than was asked for:
    ValueError, with the nearest names. ``option``: what the patterns were given as.
    """
    if isinstance(patterns, str):
        raise ValueError(f"{option}={patterns!r}: expected a sequence of names or patterns, such as [{patterns!r}]")
    matching: set[str] = set()
    for pattern in patterns:
        matches = {name for name in names if name == pattern or fnmatchcase(name, pattern)}
        if not matches:
            nearest = difflib.get_close_matches(pattern, names, n=3, cutoff=0.0)
            raise ValueError(f"{option}: {pattern!r} matches no parameter; nearest: {', '.join(nearest)}")
        matching |= matches
    return matching


def matrices(
    parameters: Mapping[str, Tensor],
    *,
    exclude: Sequence[str] = (),
    split_sizes: Mapping[str, Sequence[int]] | None = None,
    stacks: Sequence[str] = (),
) -> dict[str, SplitSizes]:
    """Name -> row blocks of every parameter that is a matrix, or a stack of matrices.

    A matrix is a parameter of exactly two dims, both larger than one, that ``exclude`` (names or patterns) leaves in; a
    parameter that ``stacks`` names is a stack (..., m, n) of them. ``split_sizes``: name or pattern -> rows of the
    blocks of a fused matrix, each a matrix of its own. ValueError for a pattern that matches nothing, a stack of fewer
    than three dims, and blocks that do not add up to the rows of their matrix.
    """
    names = list(parameters)
    excluded, stacked = (
        matching_names(names, patterns, option=option)
        for patterns, option in ((exclude, "exclude"), (stacks, "stacks"))
    )
    blocks: dict[str, tuple[int, ...]] = {}
    for pattern, sizes in (split_sizes or {}).items():
        for name in matching_names(names, [pattern], option="split_sizes"):
            if name in blocks:
                raise ValueError(f"split_sizes: {name!r} matches more than one pattern")
            blocks[name] = tuple(sizes)
    for name in stacked:
        if parameters[name].dim() < 3:
            raise ValueError(f"stacks: {name!r} has the shape {tuple(parameters[name].shape)}, which is no stack")
    for name, sizes in blocks.items():
        shape = tuple(parameters[name].shape)
        if len(shape) < 2 or (len(shape) > 2 and name not in stacked):
            raise ValueError(f"split_sizes: {name!r} has the shape {shape} and is no matrix")
        if min(sizes, default=0) < 1 or sum(sizes) != shape[-2]:
            raise ValueError(f"split_sizes: {list(sizes)} does not split the {shape[-2]} rows of {name!r}")
    return {
        name: blocks.get(name)
        for name, parameter in parameters.items()
        if name not in excluded
        and (name in stacked or parameter.dim() == 2)
        and min(parameter.shape[-2:], default=0) > 1
    }
