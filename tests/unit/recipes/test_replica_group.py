"""How a recipe's outer section becomes a rule for the round."""

import pytest

from isoloco.aggregate import MEAN, Aggregation
from recipes.config import METHOD_DEFAULTS, Outer
from recipes.replica_group import build_aggregation


@pytest.mark.parametrize(
    ("outer", "expected"),
    [
        (Outer(method="isoloco"), MEAN),
        (Outer(method="iso_c"), MEAN),  # the outer optimizer makes the mean isotropic
        (Outer(method="diloco"), MEAN),
        (Outer(method="ties", sparsity=0.5), Aggregation("ties", {"sparsity": 0.5})),
        (Outer(method="dare"), Aggregation("dare", {"sparsity": 0.1})),
        (Outer(method="iso_cts"), Aggregation("iso_cts", {"common_space_fraction": 0.8})),
        (Outer(method="tsv_m", sparsity=0.5), Aggregation("tsv_m")),
    ],
)
def test_a_method_is_a_rule_with_the_options_that_it_has(outer: Outer, expected: Aggregation) -> None:
    assert build_aggregation(outer) == expected


@pytest.mark.parametrize("method", METHOD_DEFAULTS)
def test_every_method_has_a_rule(method: str) -> None:
    build_aggregation(Outer(method=method))  # type: ignore[arg-type]
