"""How fast the outer step is: `python -m tools.benchmark_outer_step` prints tables in Markdown, progress on stderr.

Everything is measured side by side in one run: repeat r of every method comes before repeat r + 1 of any. Times are
medians. Errors are relative Frobenius errors against an SVD in float64. Peak extra memory is what torch allocated at
most beyond what there was before, inside its operators too: on the CPU read from torch's profiler, on CUDA from the
caching allocator. Matrices are Gaussian, the hard case: their singular values reach down to nearly zero.
"""

import argparse
import importlib.metadata
import math
import os
import platform
import shlex
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from isoloco.newton_schulz import COEFFICIENTS
from recipes.model_shape import FLAVORS
from tools.benchmark.gaussian_models import Shape, model_matrices, name_of, num_operations
from tools.benchmark.measured_runs import Run, median_seconds
from tools.benchmark.orthogonalizers import PACKAGE, TORCH_MUON, Cell, MatrixBenchmark, matmul_rate
from tools.benchmark.outer_steps import (
    NEWTON_SCHULZ_STEP,
    PAPERS_CODE,
    REPLICA_COUNTS,
    SVD_STEP,
    measure_exchange,
    measure_steps,
    owner_computes,
)

STEP_MODEL = "178M"
GPU_TARGET_SHAPE = (1024, 2688)
MB = 1e6


@dataclass
class Measured:
    device: torch.device
    cells: dict[str, list[Cell]]  # by model
    steps: dict[str, list[Run]]
    exchange: dict[int, Run]
    matmul_rate: float | None


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def matrices_table(cells: Sequence[Cell], budget: float) -> str:
    rows = []
    for cell in cells:
        of_svd = cell.seconds("SVD")
        for (method, form), runs in cell.runs.items():
            start: list[Any] = [cell.batch_size, name_of(cell.shape), method, form]
            if not runs:
                rows.append([*start, f"skipped: over {budget:g} s", "", "", "", 0])
                continue
            seconds = median_seconds(runs)
            ratio = f"{of_svd / seconds:.2f}" if of_svd else ""
            rows.append([*start, f"{seconds:.4f}", ratio, f"{runs[0].error:.2g}", megabytes(runs[0]), len(runs)])
    head = ["batch", "matrix", "method", "form", "seconds", "× as fast as SVD", "error", "peak extra MB", "repeats"]
    return table(head, rows)


def megabytes(run: Run) -> str:
    assert run.extra_bytes is not None
    return f"{run.extra_bytes / MB:.1f}"


def steps_table(steps: Mapping[str, list[Run]]) -> str:
    of_svd = median_seconds(steps[SVD_STEP])
    rows: list[list[Any]] = []
    for name, runs in steps.items():
        first, seconds = runs[0], median_seconds(runs)
        numbers = " / ".join(map(str, first.num_matrices)) or "all"
        shares = " / ".join(f"{work / sum(first.work):.1%}" for work in first.work) or "100%"
        rows.append([name, f"{seconds:.2f}", f"{of_svd / seconds:.2f}", f"{first.error:.2g}", numbers, shares])
        rows[-1] += [megabytes(first), len(runs)]
    head = [
        "method",
        "seconds",
        "× as fast as SVD",
        "error",
        "matrices",
        "share of the work",
        "peak extra MB",
        "repeats",
    ]
    return table(head, rows)


def exchange_table(exchange: Mapping[int, Run]) -> str:
    head = ["replicas", "peak extra MB", "seconds"]
    return table(head, [[count, megabytes(run), f"{run.seconds:.1f}"] for count, run in exchange.items()])


def verdicts(measured: Measured, bucket_bytes: int) -> str:
    """Every target with what was measured. They are about the form that is used, and real models."""
    rows: list[list[str]] = []
    is_toy = "debug" in measured.cells

    def judge(target: str, value: str | None, is_met: bool) -> None:
        verdict = "met" if is_met else "a toy: means nothing" if is_toy else "**not met**"
        rows.append([target, value or "", "not measured" if value is None else verdict])

    is_cpu = measured.device.type == "cpu"
    cells = [cell for of_model in measured.cells.values() for cell in of_model]
    ratios = {
        f"{coefficients}, {cell.batch_size} of {name_of(cell.shape)}": of_svd / ours
        for cell in cells
        for coefficients in COEFFICIENTS
        if (of_svd := cell.seconds("SVD")) and (ours := cell.seconds(f"isoloco, {coefficients}"))
    }
    worst = min(ratios, key=lambda name: ratios[name], default="")
    value = f"worst {ratios[worst]:.2f}× ({worst})" if worst else None
    judge(
        "CPU: Newton–Schulz, in the form that isoloco uses, slower than SVD for no shape",
        value if is_cpu else None,
        bool(worst) and ratios[worst] >= 1,
    )

    steps = {name: median_seconds(runs) for name, runs in measured.steps.items()}
    speed_up = min(steps[PAPERS_CODE], steps[SVD_STEP]) / steps[NEWTON_SCHULZ_STEP] if steps else 0
    value = f"{speed_up:.2f}×" if steps else None
    judge(
        "CPU: whole outer step at least 1.6× faster than with SVD (the faster of both)",
        value if is_cpu else None,
        speed_up >= 1.6,
    )
    two = measured.steps.get(owner_computes(2))
    share = max(two[0].work) / sum(two[0].work) if two else 0
    judge("half of the orthogonalisation per rank over 2 ranks", f"at most {share:.1%}" if two else None, share <= 0.51)
    last = {name: runs[0] for name, runs in measured.steps.items() if name not in (PAPERS_CODE, SVD_STEP)}
    last |= {combining(count): run for count, run in measured.exchange.items()}
    peaks = {name: (run.extra_bytes or 0) / MB for name, run in last.items()}
    most = max(peaks, key=lambda name: peaks[name], default="")
    target = f"peak extra memory below 300 MB with buckets of {bucket_bytes / MB:.0f} MB"
    judge(target, f"{peaks[most]:.0f} MB ({most})" if most else None, bool(most) and peaks[most] < 300)
    few, many = (peaks.get(combining(count), 0) for count in REPLICA_COUNTS)
    value = f"{few:.0f} / {many:.0f} MB for {' / '.join(map(str, REPLICA_COUNTS))}" if many else None
    judge("and independent of the number of replicas", value, many <= few + 1)

    gpu_ratio = f"worst {ratios[worst]:.0f}× ({worst})" if worst and not is_cpu else None
    judge("GPU: at least 100× over SVD", gpu_ratio, bool(worst) and ratios[worst] >= 100)
    rates = [
        cell.batch_size * num_operations(cell.shape) / seconds
        for cell in cells
        if cell.shape == GPU_TARGET_SHAPE and cell.batch_size > 1 and (seconds := cell.seconds("isoloco, dion"))
    ]
    rate = max(rates, default=0) / (measured.matmul_rate or math.inf)
    target = f"GPU: at least 60% of the bf16 matmul rate for batches of {name_of(GPU_TARGET_SHAPE)}"
    value = f"{rate:.0%} of {measured.matmul_rate / 1e12:.0f} TFLOP/s" if rates and measured.matmul_rate else None
    judge(target, value, rate >= 0.6)
    public = {
        f"{name}, {cell.batch_size} of {name_of(cell.shape)}": theirs / ours_seconds
        for cell in cells
        for name in (TORCH_MUON, PACKAGE)
        if (theirs := cell.seconds(name)) and (ours_seconds := cell.seconds("isoloco, dion"))
    }
    closest = min(public, key=lambda name: public[name], default="")
    value = f"{public[closest]:.2f}× as fast as {closest}" if closest and not is_cpu else None
    judge("GPU: never slower than the best public path", value, bool(closest) and public[closest] >= 1)
    return table(["target", "measured", "verdict"], rows)


def combining(num_replicas: int) -> str:
    return f"combining {num_replicas} replicas"


def machine(device: torch.device) -> str:
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        cpu = names[0].split(":")[1].strip() if names else cpu
    capability = torch.backends.cpu.get_cpu_capability()
    text = f"{os.cpu_count()} cores of {cpu} ({capability})"
    return f"{torch.cuda.get_device_name(device)}, {text}" if device.type == "cuda" else text


def package_version() -> str:
    try:
        return f", {PACKAGE} {importlib.metadata.version(PACKAGE)}"
    except importlib.metadata.PackageNotFoundError:
        return ""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure orthogonalisation and the whole outer step.")
    parser.add_argument("--models", nargs="+", choices=FLAVORS, default=["178M", "512M", "1B"], help="whose matrices")
    parser.add_argument("--shapes", nargs="+", help="only these of their matrices, as 1024x2688, and no whole step")
    parser.add_argument("--repeats", type=int, default=5, help="at most so many, and at least two")
    parser.add_argument("--seconds", type=float, default=25, help="budget of one shape and batch size")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--ranks", nargs="*", type=int, default=[2, 4], help="over how many owners; none: no ranks")
    parser.add_argument("--bucket-mb", type=float, default=256, help="in MiB")
    parser.add_argument("--quick", action="store_true", help="a tiny model and two repeats: seconds")
    parser.add_argument("--output", type=Path, help="write the report to this file as well")
    arguments = parser.parse_args()
    if arguments.repeats < 2:
        parser.error("--repeats: at least 2")
    if arguments.quick:
        arguments.models, arguments.repeats, arguments.bucket_mb = ["debug"], 2, 1
    return arguments


def measure(arguments: argparse.Namespace) -> Measured:
    device = torch.device(arguments.device)
    bucket_bytes = int(arguments.bucket_mb * 2**20)
    measured = Measured(device, {}, {}, {}, matmul_rate(device) if device.type == "cuda" else None)
    benchmark = MatrixBenchmark(device, repeats=arguments.repeats, budget=arguments.seconds, bucket_bytes=bucket_bytes)
    seen: set[Shape] = set()
    for model in arguments.models:
        wanted = model_matrices(model)
        if arguments.shapes:
            wanted = Counter({shape: n for shape, n in wanted.items() if name_of(shape) in arguments.shapes})
        measured.cells[model] = [
            cell for shape, count in wanted.items() if shape not in seen for cell in benchmark.measure(shape, count)
        ]
        seen |= set(wanted)
    if not arguments.shapes:
        model = step_model(arguments.models)
        measured.steps = measure_steps(
            model,
            device,
            arguments.ranks,
            repeats=min(3, arguments.repeats),
            threads=arguments.threads,
            bucket_bytes=bucket_bytes,
        )
        measured.exchange = measure_exchange(model, bucket_bytes)
    return measured


def step_model(models: Sequence[str]) -> str:
    return STEP_MODEL if STEP_MODEL in models else models[0]


def report(measured: Measured, arguments: argparse.Namespace) -> str:
    command = shlex.join(["python", "-m", "tools.benchmark_outer_step", *sys.argv[1:]])
    parts = [
        "# The outer step, measured",
        f"`{command}`, {time.strftime('%Y-%m-%d')}: {machine(measured.device)}, {arguments.threads} threads, "
        f"torch {torch.__version__}{package_version()}, buckets of {arguments.bucket_mb:g} MiB.",
        (__doc__ or "").split("\n\n", 1)[1].strip(),
    ]
    for model, cells in measured.cells.items():
        counts = ", ".join(f"{count} of {name_of(shape)}" for shape, count in model_matrices(model).items())
        parts += [f"## Matrices of {model}", f"The model has {counts}.", matrices_table(cells, arguments.seconds)]
    if measured.steps:
        model = step_model(arguments.models)
        parts += [
            f"## The whole outer step of {model}",
            "With Nesterov momentum. Peak extra memory is beyond parameters, momentum and pseudo-gradient, on the rank "
            "that needs most. Ranks on the CPU are processes that share its threads: what they save shows in their "
            "share of the work.",
            steps_table(measured.steps),
            f"## Combining the pseudo-gradients of all replicas of {model}",
            "Mean and correction in one process that has all replicas. Peak extra memory is beyond the parameters and "
            "the combined pseudo-gradient.",
            exchange_table(measured.exchange),
        ]
    parts += ["## Targets", verdicts(measured, int(arguments.bucket_mb * 2**20))]
    parts += ["## Not measured", "\n".join(f"- {line}" for line in not_measured(measured))]
    return "\n\n".join(parts) + "\n"


def not_measured(measured: Measured) -> list[str]:
    lines = [
        "Transfers between machines: replicas and ranks are in one. Neither their time nor the buffers of a fleet "
        "with a network are in the tables."
    ]
    if measured.device.type == "cpu":
        lines.append("Anything on a GPU. The same command with `--device cuda` measures it where there is one.")
    methods = {method for cells in measured.cells.values() for cell in cells for method, _ in cell.runs}
    if PACKAGE not in methods:
        lines.append(f"`{PACKAGE}`, which is not installed here or does not run.")
    elif measured.device.type == "cpu":
        lines.append(f"The kernels of `{PACKAGE}`, which need a GPU: on the CPU it is its code in torch that ran.")
    return lines


def main() -> int:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    text = report(measure(arguments), arguments)
    print(text, end="")
    if arguments.output is not None:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
