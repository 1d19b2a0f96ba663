"""The benchmark runs and reports what it promises. How fast anything is, is no matter for a test."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tools.benchmark.measured_runs import Run, interleaved, run_once

ROOT = Path(__file__).parents[3]
CPU = torch.device("cpu")
SHAPES = ["128x128", "384x128", "128x384", "4096x128"]
LARGEST_ERROR = {
    "SVD": 1e-5,
    "isoloco, dion": 0.15,
    "isoloco, polar_express": 0.2,
    "isoloco, muon": 0.3,
    "torch.optim.Muon": 0.3,
    "gram-newton-schulz": 0.2,  # where it is installed
}


def run_benchmark(*options):
    command = [sys.executable, "-m", "tools.benchmark_outer_step", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)


def rows_under(report, heading):
    """The rows of the table under a heading, each a dict."""
    section = report.split(f"## {heading}")[1].split("\n## ")[0]
    head, _, *rows = [
        [field.strip() for field in line.strip("|").split(" | ")] for line in section.splitlines() if line[:1] == "|"
    ]
    return [dict(zip(head, row, strict=True)) for row in rows]


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """Of a quick run over two ranks."""
    file = tmp_path_factory.mktemp("benchmark") / "new folder" / "report.md"
    result = run_benchmark("--quick", "--threads", "1", "--ranks", "2", "--output", str(file))
    assert result.returncode == 0, result.stderr
    assert result.stdout == file.read_text()
    assert "repeat 2: SVD" in result.stderr, "progress is told"
    return result.stdout


def test_it_says_what_was_measured_where(report):
    command = r"`python -m tools\.benchmark_outer_step --quick --threads 1 --ranks 2 --output .*report\.md'?`"
    machine = rf", \d+-\d+-\d+: \d+ cores of .*, 1 threads, torch {re.escape(torch.__version__)}"
    assert re.search(command + machine, report)


def test_every_shape_is_measured_singly_and_batched_with_every_method(report):
    rows = rows_under(report, "Matrices of debug")
    assert [shape for shape in dict.fromkeys(row["matrix"] for row in rows)] == SHAPES
    for shape in SHAPES:
        for is_batch in (False, True) if shape != "4096x128" else (False,):  # two of these are more than a bucket
            methods = [row["method"] for row in rows if row["matrix"] == shape and (row["batch"] != "1") == is_batch]
            assert set(LARGEST_ERROR) - {"gram-newton-schulz"} <= set(methods)
            assert methods.count("isoloco, dion") == 2, "in both forms"


def test_errors_are_those_of_the_methods(report):
    for row in rows_under(report, "Matrices of debug"):
        assert float(row["error"]) < LARGEST_ERROR[row["method"]], row
        assert float(row["error"]) > 1e-2 or row["method"] == "SVD", row
        assert float(row["peak extra MB"]) > 0
        assert row["repeats"] == "2"


def test_the_step_is_shared_by_the_ranks(report):
    svd, paper, everywhere, owners = rows_under(report, "The whole outer step of debug")
    assert float(svd["error"]) < 1e-5
    assert float(paper["error"]) < 1e-5
    assert everywhere["matrices"] == "30"
    assert owners["matrices"] == "15 / 15"
    assert owners["share of the work"] == "50.0% / 50.0%"
    assert everywhere["error"] == owners["error"]
    assert 1e-2 < float(owners["error"]) < 0.15


def test_targets_have_verdicts(report):
    verdicts = {row["target"]: row["verdict"] for row in rows_under(report, "Targets")}
    assert len(verdicts) == 8
    assert verdicts["half of the orthogonalisation per rank over 2 ranks"] == "met"
    assert verdicts["and independent of the number of replicas"] == "met"
    for target, verdict in verdicts.items():
        assert (verdict == "not measured") == target.startswith("GPU"), target


def test_peak_memory_counts_what_was_alive_together():
    def twice():
        for _ in range(3):
            torch.empty(1000, 1000)
        return torch.empty(1000, 1000).neg_()

    assert run_once(twice, CPU, with_memory=True)[1].extra_bytes == 4_000_000
    a = torch.randn(300, 300)
    inside = run_once(lambda: torch.linalg.svdvals(a), CPU, with_memory=True)[1].extra_bytes
    assert inside > a.nbytes, "LAPACK works on a copy"


def test_methods_take_turns_and_stop_when_time_is_up():
    calls = []

    def method(name, seconds):
        def run(with_memory):
            calls.append((name, with_memory))
            return Run(seconds)

        return run

    runs = interleaved("test", {"fast": method("fast", 0.1), "slow": method("slow", 9)}, 3, 5)
    assert calls == [("fast", True), ("slow", True), ("fast", False), ("fast", False)]
    assert {name: len(its_runs) for name, its_runs in runs.items()} == {"fast": 3, "slow": 1}
    runs = interleaved("test", {"fast": method("fast", 0.1)}, 3, 0)
    assert len(runs["fast"]) == 1, "one over the budget is not run again"


def test_one_repeat_is_no_median():
    result = run_benchmark("--quick", "--repeats", "1")
    assert result.returncode == 2
    assert "--repeats: at least 2" in result.stderr
