"""Who works on which matrix: a division of work that every rank finds by itself, from shapes alone."""

import heapq
import math
from collections.abc import Sequence


def orthogonalization_cost(shape: Sequence[int]) -> float:
    """Relative cost of orthogonalising a stack of matrices of ``shape`` (..., m, n).

    For m ≤ n (else the other way round) 15 m²n + 5 m³ per matrix, the multiplications of five Newton–Schulz iterations
    in which each symmetric product is half computed; an SVD grows alike. A vector or scalar costs its elements.
    """
    if len(shape) < 2:
        return float(math.prod(shape))
    *batch, rows, cols = shape
    m, n = min(rows, cols), max(rows, cols)
    return float(math.prod(batch) * (15 * m * m * n + 5 * m**3))


def assign_owners(costs: Sequence[float], num_owners: int) -> list[int]:
    """For each item, which of ``num_owners`` owners (0, 1, …) gets it: longest processing time first.

    The costliest item that is left goes to the owner with the least so far; ties go to the earlier item and to the
    lowest owner, so the same costs give the same owners everywhere. The busiest owner has at most 4/3 of what it would
    have in the best division (Graham 1969). ValueError without owners and for negative or non-finite costs.
    """
    if num_owners < 1:
        raise ValueError(f"num_owners={num_owners}: somebody has to do the work")
    for cost in costs:
        if not (cost >= 0 and math.isfinite(cost)):
            raise ValueError(f"a cost of {cost}: costs are finite and not negative")
    owners = [0] * len(costs)
    loads = [(0.0, owner) for owner in range(num_owners)]  # a heap: the least loaded owner comes first
    for item in sorted(range(len(costs)), key=lambda item: (-costs[item], item)):
        load, owner = loads[0]
        owners[item] = owner
        heapq.heapreplace(loads, (load + costs[item], owner))
    return owners
