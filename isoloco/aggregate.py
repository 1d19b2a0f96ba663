"""Make one outer gradient of the pseudo-gradients of several workers: their mean, or what a merging rule makes of them.

Every tensor is merged by itself. Descent sign, as everywhere: Δᵢ = θ_old − θᵢ, and the outer step subtracts.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from isoloco.exact_matmuls import exact_matmuls
from isoloco.isotropic import make_isotropic
from isoloco.magnitude import cut_smallest
from isoloco.spectrum import largest_magnitude, thin_svd
from isoloco.whole_matrix import Job, WholeMatrices

# Of each rule, its options and the values that they have in IsoLoCo's experiments.
OPTIONS: dict[str, dict[str, Any]] = {
    "mean": {},
    "iso_c": {},
    "iso_cts": {"common_space_fraction": 0.8},
    "tsv_m": {"singular_ratio": None, "decorrelate": True},
    "ties": {"sparsity": 0.1},
    "dare": {"sparsity": 0.1, "rescale": True, "seed": 0, "shared_masks": False},
}

_OF_MATRICES = ("iso_c", "iso_cts", "tsv_m")  # to everything else these are the mean

_CHUNK = 2**22  # elements that an elementwise rule works on at a time, over all workers


@torch.no_grad()
def aggregate(
    deltas: Sequence[Tensor],
    rule: str = "mean",
    *,
    weights: Sequence[float] | None = None,
    sparsity: float | None = None,
    rescale: bool | None = None,
    common_space_fraction: float | None = None,
    singular_ratio: float | None = None,
    decorrelate: bool | None = None,
    seed: int | None = None,
    shared_masks: bool | None = None,
    worker_ids: Sequence[int] | None = None,
    name: str = "",
    round_number: int = 0,
) -> Tensor:
    """Merge the pseudo-gradients ``deltas`` of R workers for one tensor. A new tensor, like the first of them.

    They have equal shapes and any floating dtype; the arithmetic is fp32 (fp64 for fp64). All rules are odd and
    homogeneous: merging c Δᵢ gives c times the result. The order of the workers does not matter beyond rounding.
    DTensors are brought whole first (a collective over their mesh). The rules, with the options of each:

    - ``"mean"``: Σ Δᵢ / R.
    - ``"iso_c"`` (Iso-C, arXiv 2502.04959; IsoLoCo, Algorithm 2): the mean of matrices, made isotropic by SVD.
    - ``"iso_cts"`` (Iso-CTS, same paper), in the scale of the mean: the first ``common_space_fraction`` (0.8) of the
      left singular vectors of the mean, and from what each Δᵢ has outside of these its own first ones, as many from
      each, together made orthogonal on both sides; all with the mean of their singular values. R + 3 SVDs.
    - ``"tsv_m"`` (TSV-M, arXiv 2412.00081), in the scale of the sum: the first ⌊r / R⌋ singular triplets of every Δᵢ
      (``singular_ratio`` r if given), r = min(m, n), their singular vectors made orthogonal to each other
      (``decorrelate``). R + 2 SVDs. Of one worker, its Δ.
    - ``"ties"`` (TIES, arXiv 2306.01708): every Δᵢ loses the ``sparsity`` (0.1) smallest of its entries; of what is
      left, entry by entry, the mean over the workers that have the sign of the sum. k = max(1, ⌊(1 − sparsity) numel⌋)
      entries stay; of equally large ones, the first.
    - ``"dare"`` (DARE, arXiv 2311.03099): every Δᵢ loses random entries, k stay as in TIES, and is divided by
      1 − sparsity (``rescale``); then the mean. The masks are made from ``seed``, ``name`` of the tensor,
      ``round_number``, and ``worker_ids`` (0 … R − 1 if not given), and are the same on every device;
      ``shared_masks`` gives all workers the same mask, as IsoLoCo's code does.

    ``iso_c``, ``iso_cts`` and ``tsv_m`` are for matrices, tensors of exactly two dims; for others they are the mean.
    Where singular vectors belong to null directions they count as zero: those that LAPACK returns are arbitrary.

    ``weights``: a mean becomes Σ wᵢ Δᵢ / Σ wᵢ. In general Δᵢ counts as R wᵢ / Σ wᵢ times itself in every sum; TIES has
    weighted sums for the sign and for the mean over those that agree. A worker with weight 0 is left out altogether.

    Raises ValueError for an empty list, unequal shapes, "non-finite" values, weights that are negative or all zero,
    and options that are out of range or belong to another rule.
    """
    given = {
        "sparsity": sparsity,
        "rescale": rescale,
        "common_space_fraction": common_space_fraction,
        "singular_ratio": singular_ratio,
        "decorrelate": decorrelate,
        "seed": seed,
        "shared_masks": shared_masks,
    }
    aggregation = Aggregation(rule, {option: value for option, value in given.items() if value is not None})
    return aggregation.merge(deltas, weights=weights, replica_ids=worker_ids, name=name, round_number=round_number)


def check_aggregation(rule: str, options: Mapping[str, Any]) -> None:
    """Raise ValueError, naming the option, for a rule or options that :func:`aggregate` does not have."""
    if rule not in OPTIONS:
        raise ValueError(f"rule={rule!r} is unknown: use one of {', '.join(map(repr, OPTIONS))}")
    for option in options:
        if option not in OPTIONS[rule]:
            owners = [other for other in OPTIONS if option in OPTIONS[other]]
            where = f"it belongs to {', '.join(map(repr, owners))}" if owners else "no rule has it"
            raise ValueError(f"{option}={options[option]!r} is no option of the rule {rule!r}: {where}")
    sparsity, fraction = options.get("sparsity", 0), options.get("common_space_fraction", 0)
    ratio = options.get("singular_ratio")
    if not 0 <= sparsity < 1:
        raise ValueError(f"sparsity={sparsity}: the share of entries to drop is at least 0 and below 1")
    if not 0 <= fraction <= 1:
        raise ValueError(f"common_space_fraction={fraction}: a share of singular directions is from 0 to 1")
    if ratio is not None and not 0 < ratio <= 1:
        raise ValueError(f"singular_ratio={ratio}: the share of singular triplets to keep is above 0 and at most 1")


@dataclass(frozen=True)
class Aggregation:
    """A rule of :func:`aggregate` with its options, checked (ValueError) before there is anything to merge."""

    rule: str = "mean"
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_aggregation(self.rule, self.options)

    def needs_every_delta(self, shape: Sequence[int]) -> bool:
        """Whether a tensor of this shape needs every Δᵢ, whole; to all others the rule is the (weighted) mean."""
        return self.rule in ("ties", "dare") or (self.rule in _OF_MATRICES and len(shape) == 2)

    @torch.no_grad()
    def merge(
        self,
        deltas: Sequence[Tensor],
        *,
        weights: Sequence[float] | None = None,
        replica_ids: Sequence[int] | None = None,
        name: str = "",
        round_number: int = 0,
    ) -> Tensor:
        """What :func:`aggregate` does."""
        if not deltas:
            raise ValueError("there is nothing to aggregate: the list of pseudo-gradients is empty")
        shapes = [tuple(delta.shape) for delta in deltas]
        if len(set(shapes)) > 1 or not all(delta.is_floating_point() for delta in deltas):
            raise ValueError(f"the pseudo-gradients need equal shapes and a floating dtype, got {shapes}")
        if weights is None:
            weights = [1.0] * len(deltas)
        if replica_ids is None:
            replica_ids = range(len(deltas))
        if len(weights) != len(deltas) or len(replica_ids) != len(deltas):
            raise ValueError(f"{len(deltas)} pseudo-gradients, {len(weights)} weights, {len(replica_ids)} worker ids")
        if not (all(weight >= 0 and math.isfinite(weight) for weight in weights) and sum(weights) > 0):
            raise ValueError(f"weights={list(weights)}: they are finite, at least 0, and one of them is above 0")

        counted = [number for number, weight in enumerate(weights) if weight > 0]
        deltas = [deltas[number] for number in counted]
        workers = _Workers(
            weights=[float(weights[number]) for number in counted],
            seeds=[f"{name}/{round_number}/{replica_ids[number]}" for number in counted],
            shared_seed=f"{name}/{round_number}",
        )
        if not any(isinstance(delta, DTensor) for delta in deltas):
            return self._merge_whole(deltas, workers)
        result = torch.empty_like(deltas[0])
        WholeMatrices().apply(
            [Job(tuple(deltas), result)],
            lambda _, stacks: self._merge_whole([stack[0] for stack in stacks], workers).unsqueeze(0),
        )
        return result

    def _merge_whole(self, deltas: Sequence[Tensor], workers: "_Workers") -> Tensor:
        if deltas[0].numel() == 0:
            return deltas[0].clone()
        for delta in deltas:
            largest_magnitude(delta)
        options = OPTIONS[self.rule] | dict(self.options)
        with exact_matmuls(deltas[0].device):
            if not self.needs_every_delta(deltas[0].shape):
                merged = _mean(deltas, workers)
            elif self.rule == "iso_c":
                merged = make_isotropic(_mean(deltas, workers), overwrite=True).matrix
            elif self.rule == "iso_cts":
                merged = _iso_cts(deltas, workers, options["common_space_fraction"])
            elif self.rule == "tsv_m":
                merged = _tsv_m(deltas, workers, options["singular_ratio"], options["decorrelate"])
            elif self.rule == "ties":
                merged = _ties(deltas, workers, options["sparsity"])
            else:
                merged = _dare(deltas, workers, **options)
        return merged.to(deltas[0].dtype)


MEAN = Aggregation()


@dataclass(frozen=True)
class _Workers:
    """Those whose pseudo-gradients count."""

    weights: list[float]
    seeds: list[str]
    shared_seed: str

    @property
    def shares(self) -> list[float]:
        return [weight / sum(self.weights) for weight in self.weights]


def _work_dtype(deltas: Sequence[Tensor]) -> torch.dtype:
    return torch.promote_types(deltas[0].dtype, torch.float32)


def _num_kept(sparsity: float, numel: int) -> int:
    return max(1, int((1 - sparsity) * numel))


# ---- the rules; each returns a new tensor in the dtype that it works in ----


def _mean(deltas: Sequence[Tensor], workers: _Workers) -> Tensor:
    total = torch.zeros(deltas[0].shape, dtype=_work_dtype(deltas), device=deltas[0].device)
    for delta, weight in zip(deltas, workers.weights, strict=True):
        total.add_(delta, alpha=weight)
    return total.div_(sum(workers.weights))


def _iso_cts(deltas: Sequence[Tensor], workers: _Workers, common_space_fraction: float) -> Tensor:
    m, n = deltas[0].shape
    r, num_workers = min(m, n), len(deltas)
    num_common, num_each = iso_cts_spaces(r, num_workers, common_space_fraction)
    num_own = num_workers * num_each

    mean = _mean(deltas, workers)
    svd = thin_svd(mean[None])
    common_U, common_sigma, common_V = svd.top(num_common)
    null = r * torch.finfo(mean.dtype).eps * svd.sigma[0, 0]
    del svd
    U, sigma, V = mean.new_empty(1, m, r), mean.new_empty(1, r), mean.new_empty(1, n, r)
    for number, (delta, share) in enumerate(zip(deltas, workers.shares, strict=True)):
        if num_each == 0:
            break
        own = slice(number * num_each, (number + 1) * num_each)
        residual = delta.to(mean.dtype) * share
        residual = torch.addmm(residual, common_U[0], common_U[0].mT @ residual, alpha=-1)
        U[..., own], sigma[..., own], V[..., own] = thin_svd(residual[None]).top(num_each)
        is_noise = (sigma[..., own] <= null).unsqueeze(-2)  # what rounding leaves of a Δᵢ in the common space
        U[..., own].masked_fill_(is_noise, 0)
        V[..., own].masked_fill_(is_noise, 0)
    U[..., num_own:], sigma[..., num_own:], V[..., num_own:] = common_U, common_sigma, common_V
    return sigma.mean() * (_orthogonal(U) @ _orthogonal(V).mT)[0]


def iso_cts_spaces(r: int, num_workers: int, common_space_fraction: float) -> tuple[int, int]:
    """How many of the r directions of Iso-CTS are common, and how many are each worker's own."""
    num_each = round((r - int(r * common_space_fraction)) / num_workers)
    if num_each * num_workers > r:  # rounded up beyond what there is
        num_each -= 1
    return r - num_each * num_workers, num_each


def _tsv_m(deltas: Sequence[Tensor], workers: _Workers, singular_ratio: float | None, decorrelate: bool) -> Tensor:
    dtype, num_workers = _work_dtype(deltas), len(deltas)
    if num_workers == 1:
        return deltas[0].to(dtype, copy=True)
    m, n = deltas[0].shape
    r = min(m, n)
    k = max(1, r // num_workers if singular_ratio is None else int(singular_ratio * r))

    new = deltas[0].new_empty
    U, V = new(1, m, k * num_workers, dtype=dtype), new(1, n, k * num_workers, dtype=dtype)
    sigma = new(1, k * num_workers, dtype=dtype)
    for number, delta in enumerate(deltas):
        own = slice(number * k, (number + 1) * k)
        U[..., own], sigma[..., own], V[..., own] = thin_svd(delta.to(dtype)[None]).top(k)
        sigma[..., own] *= num_workers * workers.shares[number]
    if decorrelate:
        U, V = _orthogonal(U), _orthogonal(V)
    return ((U * sigma.unsqueeze(-2)) @ V.mT)[0]


def _orthogonal(matrix: Tensor) -> Tensor:
    """The closest matrix with orthonormal columns (or rows), in the memory of (1, m, n); null directions stay zero."""
    svd = thin_svd(matrix)
    return svd.with_sigma(svd.kept.to(matrix.dtype), out=matrix)


def _ties(deltas: Sequence[Tensor], workers: _Workers, sparsity: float) -> Tensor:
    dtype = _work_dtype(deltas)
    flat = [delta.reshape(-1) for delta in deltas]
    numel = flat[0].numel()
    cuts = [cut_smallest(delta, numel - _num_kept(sparsity, numel)) for delta in flat]
    merged = torch.empty(numel, dtype=dtype, device=flat[0].device)
    size = max(1, _CHUNK // len(flat))
    for start in range(0, numel, size):
        part = slice(start, min(start + size, numel))
        trimmed = [cut.apply(delta[part].to(dtype), start) for delta, cut in zip(flat, cuts, strict=True)]
        weighted = list(zip(trimmed, workers.weights, strict=True))
        elected = torch.stack([delta * weight for delta, weight in weighted]).sum(0).sign()
        total, count = torch.zeros_like(elected), torch.zeros_like(elected)
        for delta, weight in weighted:
            agrees = (delta.sign() == elected).to(dtype) * weight
            total += delta * agrees
            count += agrees
        merged[part] = total / torch.where(count > 0, count, 1)
    return merged.view(deltas[0].shape)


def _dare(
    deltas: Sequence[Tensor], workers: _Workers, *, sparsity: float, rescale: bool, seed: int, shared_masks: bool
) -> Tensor:
    numel = deltas[0].numel()
    total = torch.zeros(numel, dtype=_work_dtype(deltas), device=deltas[0].device)
    for delta, weight, worker in zip(deltas, workers.weights, workers.seeds, strict=True):
        dropped = _random_indices(
            numel, _num_kept(sparsity, numel), f"{seed}/{workers.shared_seed if shared_masks else worker}"
        )
        total.add_(delta.reshape(-1).index_fill(0, dropped.to(delta.device), 0), alpha=weight)
    total /= sum(workers.weights)
    if rescale:
        total /= 1 - sparsity
    return total.view(deltas[0].shape)


def _random_indices(numel: int, num_kept: int, seed: str) -> Tensor:
    """The indices that are dropped. Drawn on the CPU, so that they do not depend on the device."""
    number = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8], "big") >> 1
    # int32, because a whole permutation of a large matrix is as large as the matrix
    dtype = torch.int32 if numel < 2**31 else torch.int64
    order = torch.randperm(numel, generator=torch.Generator().manual_seed(number), dtype=dtype)
    return order[num_kept:].long()
