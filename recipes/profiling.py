"""torch.profiler traces of a few inner steps, every `profiling.profile_freq` of them."""

from pathlib import Path
from typing import Any, Protocol

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from recipes.config import Recipe

_NUM_WARMUP_STEPS = 1
_NUM_ACTIVE_STEPS = 1


class Profiler(Protocol):
    """Told after each inner step."""

    def step(self) -> None: ...


class _Off:
    def step(self) -> None:
        pass


def start_profiling(recipe: Recipe, folder: Path, rank: int) -> Profiler:
    """Record a Chrome trace per `profile_freq` steps into the replica's folder, if the recipe asks for it."""
    if not recipe.profiling.enable_profiling:
        return _Off()
    traces = folder / recipe.profiling.save_traces_folder
    traces.mkdir(parents=True, exist_ok=True)

    def write(profiler: Any) -> None:
        profiler.export_chrome_trace(str(traces / f"step{profiler.step_num}_rank{rank}.json.gz"))

    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    wait = max(0, recipe.profiling.profile_freq - _NUM_WARMUP_STEPS - _NUM_ACTIVE_STEPS)
    profiler = profile(
        activities=activities,
        schedule=schedule(wait=wait, warmup=_NUM_WARMUP_STEPS, active=_NUM_ACTIVE_STEPS),
        on_trace_ready=write,
        record_shapes=True,
    )
    profiler.start()
    return profiler
