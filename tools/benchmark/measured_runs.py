"""Runs of several methods side by side: how long each took, and how much memory at most."""

import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler reports its starts and stops otherwise


@dataclass
class Run:
    """One run of one method."""

    seconds: float
    extra_bytes: int | None = None
    error: float | None = None
    num_matrices: tuple[int, ...] = ()  # of each rank
    work: tuple[float, ...] = ()  # of each rank


def run_once(function: Callable[[], Any], device: torch.device, *, with_memory: bool) -> tuple[Any, Run]:
    """What ``function`` returns, how long it took and, if asked for, its peak extra memory, the result included."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        started = time.perf_counter()
        result = function()
        torch.cuda.synchronize(device)
        seconds = time.perf_counter() - started
        return result, Run(seconds, torch.cuda.max_memory_allocated(device) - before)
    if not with_memory:
        started = time.perf_counter()
        result = function()
        return result, Run(time.perf_counter() - started)
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        started = time.perf_counter()
        result = function()
        seconds = time.perf_counter() - started
    recorded: Any = profile.kineto_results
    changes = [event for event in recorded.events() if event.name() == "[memory]"]
    live = peak = 0
    for change in sorted(changes, key=lambda event: event.start_ns()):
        live += change.nbytes()
        peak = max(peak, live)
    return result, Run(seconds, peak)


def interleaved(
    what: str, methods: Mapping[str, Callable[[bool], Run]], repeats: int, budget: float
) -> dict[str, list[Run]]:
    """Run all methods, then all again, ``repeats`` times or until ``budget`` seconds are spent, but at least twice.

    A method is called with whether to measure memory as well: True the first time. One whose first run takes longer
    than the budget is not run again.
    """
    runs: dict[str, list[Run]] = {name: [] for name in methods}
    started = time.monotonic()
    for repeat in range(repeats):
        if repeat >= 2 and (time.monotonic() - started) * (repeat + 1) / repeat > budget:
            break
        for name, method in methods.items():
            if repeat > 0 and runs[name][0].seconds > budget:
                continue
            runs[name].append(method(repeat == 0))
            progress(f"{what}, repeat {repeat + 1}: {name}: {runs[name][-1].seconds:.3f} s")
    return runs


def progress(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def median_seconds(runs: Sequence[Run]) -> float:
    return statistics.median(run.seconds for run in runs)
