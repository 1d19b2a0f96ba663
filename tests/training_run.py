"""Start real runs with the launcher, watch their files, end them. What an end-to-end test stands on."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent

SMALL = (
    "--training.seq_len", "32",
    "--training.local_batch_size", "2",
    "--outer.sync_steps", "5",
    "--checkpoint.interval", "5",
    "--validation.steps", "1",
    "--metrics.log_freq", "5",
    "--fault_tolerance.heartbeat_timeout_seconds", "2",
)  # fmt: skip
"""Flags that make the debug recipe small: seconds instead of minutes."""

ONE_RANK = ("--parallelism.data_parallel_shard_degree", "1")


@contextmanager
def running(folder: Path, *flags: str, environment: dict[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
    """A launcher started on ``folder``; whatever happens, it is gone when the block ends. Its output is a pipe."""
    process = subprocess.Popen(
        [sys.executable, "-m", "recipes.launch", "--job.dump_folder", str(folder), *flags],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
        stdout=(folder.parent / f"{folder.name}.console").open("a"),
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def console(folder: Path) -> str:
    """What the launchers of this folder printed so far."""
    return (folder.parent / f"{folder.name}.console").read_text()


def train(folder: Path, *flags: str, seconds: float = 240) -> str:
    """Run to completion and return what was printed; anything but exit status 0 fails the test."""
    with running(folder, *flags) as process:
        status = process.wait(timeout=seconds)
    assert status == 0, f"exit status {status}:\n{console(folder)}"
    return console(folder)


def wait_until(condition: Callable[[], Any], what: str, *, seconds: float = 120) -> Any:
    """Poll until the condition holds, and return what it returned; fail with ``what`` after the deadline."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.05)
    raise AssertionError(f"not within {seconds:.0f} s: {what}")


def rows(folder: Path, replica: int, name: str) -> list[dict[str, Any]]:
    """Whole rows of one of a replica's JSONL files; none if it does not exist yet."""
    file = folder / f"replica_{replica}" / name
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]


def summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())


def committed_samples(ledger: Sequence[dict[str, Any]], samples_per_epoch: int) -> list[int]:
    """Every sample number that the ledger's rows name, in order of their numbers (repeated if named twice)."""
    return sorted(
        row["epoch"] * samples_per_epoch + sample
        for row in ledger
        for start, stop in row["samples"]
        for sample in range(start, stop)
    )
