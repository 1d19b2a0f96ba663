"""Orthogonalisation of single matrices and of batches: SVD, isoloco and the public Newton–Schulz iterations."""

import functools
import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim._muon import DEFAULT_A, DEFAULT_B, DEFAULT_C, DEFAULT_NS_STEPS, EPS, _zeropower_via_newtonschulz

from isoloco import gram_kernels, newton_schulz
from isoloco.newton_schulz import (
    COEFFICIENTS,
    coefficient_triples,
    divide_by_norm,
    gram_form,
    independent,
    plain_form,
    uses_gram_form,
)
from isoloco.spectrum import unit_scaled
from tools.benchmark.gaussian_models import (
    Shape,
    batch_of,
    gaussian,
    name_of,
    num_operations,
    reference,
    relative_error,
)
from tools.benchmark.measured_runs import Run, interleaved, median_seconds, progress, run_once

TORCH_MUON = "torch.optim.Muon"
PACKAGE = "gram-newton-schulz"


def svd(batch: Tensor) -> Tensor:
    U, _, Vt = torch.linalg.svd(batch, full_matrices=False)
    return U @ Vt


def torch_muon(batch: Tensor) -> Tensor:
    triple = (DEFAULT_A, DEFAULT_B, DEFAULT_C)
    return torch.stack([_zeropower_via_newtonschulz(matrix, triple, DEFAULT_NS_STEPS, EPS) for matrix in batch])


def form_used(shape: Shape, device: torch.device) -> str:
    """What newton_schulz chooses for fp32 matrices of this shape."""
    if gram_kernels.can_be_used(torch.empty(1, *shape, device=device)):
        return "Gram, fp16 kernels"
    dtype, name = (torch.float32, "fp32") if device.type == "cpu" else (torch.bfloat16, "bf16")
    return f"Gram, {name}" if uses_gram_form(shape, dtype) else f"plain, {name}"


def in_form(batch: Tensor, form: str, dtype: torch.dtype) -> Tensor:
    """newton_schulz in the form that it would not choose."""
    triples = coefficient_triples("dion", 5)
    result = batch.clone()
    for one in independent(result):
        unit, _ = unit_scaled(one, overwrite=True)
        divide_by_norm(unit)
        unit = unit.to(dtype)
        one.copy_(plain_form(unit, triples) if form == "plain" else gram_form(unit, triples).matrix)
    return result


def gram_package(device: torch.device) -> Callable[[Tensor], Tensor] | None:
    """gram-newton-schulz as it comes on CUDA, its torch code on the CPU; None where it is not there or will not run."""
    if importlib.util.find_spec("gram_newton_schulz") is None:
        return None
    package: Any = importlib.import_module("gram_newton_schulz")
    try:
        options = {} if device.type == "cuda" else {"ns_use_kernels": False, "compile_kwargs": None}
        iteration: Callable[[Tensor], Tensor] = package.GramNewtonSchulz(**options)
        iteration(torch.randn(1, 512, 1024, device=device))
    except Exception as error:  # whatever it is, the rest can be measured
        progress(f"gram-newton-schulz does not run here: {type(error).__name__}: {error}")
        return None
    return iteration


def methods_for(shape: Shape, device: torch.device) -> dict[tuple[str, str], Callable[[Tensor], Tensor]]:
    """(method, form) -> a function of batches (B, m, n) in fp32."""
    used = form_used(shape, device)
    methods: dict[tuple[str, str], Callable[[Tensor], Tensor]] = {("SVD", "fp32"): svd}
    for coefficients in COEFFICIENTS:
        methods[f"isoloco, {coefficients}", used] = functools.partial(newton_schulz, coefficients=coefficients)
    forms = {"plain, fp32": ("plain", torch.float32), "Gram, fp32": ("Gram", torch.float32)}
    if device.type == "cuda":
        forms["plain, bf16"] = ("plain", torch.bfloat16)
        del forms["plain, fp32"]
    for form, (kind, dtype) in forms.items():
        if form != used:
            methods["isoloco, dion", form] = functools.partial(in_form, form=kind, dtype=dtype)
    methods[TORCH_MUON, "plain, bf16"] = torch_muon
    if (package := gram_package(device)) is not None:
        form = "plain" if shape[0] == shape[1] else "Gram"
        methods[PACKAGE, f"{form}, fp16"] = package
    return methods


@dataclass
class Cell:
    """What was measured of one shape and batch size: (method, form) -> runs; none if it was left out."""

    shape: Shape
    batch_size: int
    runs: dict[tuple[str, str], list[Run]]

    def seconds(self, method: str, form: str | None = None) -> float | None:
        """The median; of the form first listed, which is the one used, unless another is named."""
        for (name, its_form), runs in self.runs.items():
            if name == method and form in (None, its_form) and runs:
                return median_seconds(runs)
        return None


class MatrixBenchmark:
    """Measures shapes, the cheapest first, so that a method too slow for its time is known before it is run."""

    def __init__(self, device: torch.device, *, repeats: int, budget: float, bucket_bytes: int) -> None:
        self.device = device
        self.repeats = repeats
        self.budget = budget
        self.bucket_bytes = bucket_bytes
        self._pace: dict[str, float] = {}  # of each method, seconds for an operation, when last run

    def measure(self, shape: Shape, count: int) -> list[Cell]:
        """One matrix and then, if they are expected to take a third of the budget, as many as one batch would have."""
        cells = [self._cell(shape, 1)]
        seconds = sum(runs[-1].seconds for runs in cells[0].runs.values() if runs)
        fitting = max(1, self.bucket_bytes // 2 // (4 * math.prod(shape)))  # as WholeMatrices makes its batches
        size = min(count, fitting, int(self.budget / 3 / seconds))
        if size > 1:
            cells.append(self._cell(shape, size))
        return cells

    def _cell(self, shape: Shape, size: int) -> Cell:
        exact = batch_of(reference(shape)[0], size)
        batch = batch_of(gaussian(shape), size).to(self.device)
        operations = size * num_operations(shape)

        def measured(function: Callable[[Tensor], Tensor], with_memory: bool) -> Run:
            result, run = run_once(lambda: function(batch), self.device, with_memory=with_memory)
            run.error = relative_error(result.cpu(), exact) if with_memory else None
            return run

        methods = methods_for(shape, self.device)
        chosen = {key: f for key, f in methods.items() if self._pace.get(key[0], 0) * operations <= self.budget}
        named = {f"{name} ({form})": functools.partial(measured, f) for (name, form), f in chosen.items()}
        runs = interleaved(f"{size} of {name_of(shape)}", named, self.repeats, self.budget)
        cell = Cell(shape, size, {key: [] for key in methods} | dict(zip(chosen, runs.values(), strict=True)))
        for (name, _), its_runs in cell.runs.items():
            if its_runs:
                self._pace[name] = median_seconds(its_runs) / operations
        return cell


def matmul_rate(device: torch.device) -> float:
    """Operations a second of a large product in bf16."""
    size = 8192
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    runs = [run_once(lambda: a @ a, device, with_memory=False)[1] for _ in range(20)]
    return 2 * size**3 / median_seconds(runs[5:])
