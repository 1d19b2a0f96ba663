"""Which parameters are matrices, and of which blocks, follows from names and metadata that are checked."""

import pytest
import torch

from isoloco.parameter_names import matching_names, matrices

PARAMETERS = {
    "embedding.weight": torch.zeros(12, 5),
    "layer.qkv": torch.zeros(9, 4),
    "layer.gate_up": torch.zeros(8, 4),
    "layer.experts": torch.zeros(3, 4, 6),
    "row": torch.zeros(1, 9),
    "gain": torch.zeros(7),
}


def test_matrices_have_exactly_two_dims_larger_than_one() -> None:
    assert matrices(PARAMETERS) == {"embedding.weight": None, "layer.qkv": None, "layer.gate_up": None}


def test_excluded_names_stay_out() -> None:
    assert set(matrices(PARAMETERS, exclude=["embedding.*"])) == {"layer.qkv", "layer.gate_up"}


def test_stacks_and_blocks_are_declared_by_name() -> None:
    chosen = matrices(
        PARAMETERS, stacks=["*.experts"], split_sizes={"layer.qkv": [3, 3, 3], "*gate_up": [4, 4], "*experts": [2, 2]}
    )
    assert chosen["layer.experts"] == (2, 2)
    assert chosen["layer.qkv"] == (3, 3, 3)
    assert chosen["layer.gate_up"] == (4, 4)
    assert chosen["embedding.weight"] is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exclude": ["layer.qkvv"]}, "exclude: 'layer.qkvv' matches no parameter; nearest: layer.qkv"),
        ({"stacks": ["expert"]}, "stacks: 'expert' matches no parameter"),
        ({"split_sizes": {"qkv": [3, 3, 3]}}, "split_sizes: 'qkv' matches no parameter"),
        ({"exclude": "layer.qkv"}, "expected a sequence of names"),
        ({"stacks": ["layer.qkv"]}, "which is no stack"),
        ({"split_sizes": {"layer.qkv": [4, 4]}}, "does not split the 9 rows of 'layer.qkv'"),
        ({"split_sizes": {"layer.qkv": [9, 0]}}, "does not split the 9 rows"),
        ({"split_sizes": {"gain": [7]}}, "is no matrix"),
        ({"split_sizes": {"layer.experts": [2, 2]}}, "is no matrix"),
        ({"split_sizes": {"layer.qkv": [3, 6], "*qkv": [3, 6]}}, "matches more than one pattern"),
    ],
)
def test_what_cannot_be_meant_is_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("[", r"\[").replace("*", r"\*")):
        matrices(PARAMETERS, **options)


def test_patterns_match_as_file_names_do() -> None:
    assert matching_names(list(PARAMETERS), ["layer.*", "gain"], option="x") == {
        "layer.qkv",
        "layer.gate_up",
        "layer.experts",
        "gain",
    }
