"""A group's processes are found by their environment, all of them and no other, and killed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from recipes.run_processes import kill_processes_with, processes_with
from tools.kill_group import processes_of_group

ROOT = Path(__file__).parents[3]


@pytest.fixture
def start():
    """Start a process that sleeps, with variables beside ours in its environment."""
    started = []

    def start(**variables):
        process = subprocess.Popen(["sleep", "300"], env={**os.environ, **variables})
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def kill_group(folder, group):
    command = [sys.executable, "-m", "tools.kill_group", str(folder), str(group)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_all_processes_of_the_group_are_killed_and_no_other(start, tmp_path):
    run = str(tmp_path / "run")
    mine = [start(RUN_FOLDER=run, REPLICA_ID="1") for _ in range(3)]
    others = [
        start(RUN_FOLDER=run, REPLICA_ID="0"),
        start(RUN_FOLDER=run, REPLICA_ID="11"),
        start(RUN_FOLDER=f"{run}2", REPLICA_ID="1"),
        start(RUN_FOLDER=run),
        start(REPLICA_ID="1"),
    ]
    assert processes_of_group(tmp_path / "run", 1) == sorted(process.pid for process in mine)
    result = kill_group(tmp_path / "run", 1)
    assert result.returncode == 0
    assert result.stdout == f"killed group 1: processes {', '.join(str(p) for p in sorted(p.pid for p in mine))}\n"
    assert [process.wait(timeout=10) for process in mine] == [-signal.SIGKILL] * 3
    assert [process.poll() for process in others] == [None] * 5


def test_the_folder_may_be_named_in_any_way(start, tmp_path, monkeypatch):
    process = start(RUN_FOLDER=str(tmp_path / "run"), REPLICA_ID="0")
    (tmp_path / "link").symlink_to(tmp_path)
    monkeypatch.chdir(tmp_path)
    for name in ("run", "./run", "../" + tmp_path.name + "/run", "link/run/"):
        assert processes_of_group(Path(name), 0) == [process.pid]


def test_without_a_living_process_it_says_so(tmp_path):
    result = kill_group(tmp_path / "run", 1)
    assert result.returncode == 2
    assert result.stderr == f"error: no process of group 1 of a run in {tmp_path}/run is alive\n"
    assert result.stdout == ""


def test_a_process_does_not_find_itself(tmp_path):
    program = (
        "import os, sys; from recipes.run_processes import *;"
        "marks = {'RUN_FOLDER': sys.argv[1]}; print(processes_with(marks), kill_processes_with(marks))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "RUN_FOLDER": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert result.stdout == "[] []\n"


def test_what_has_ended_is_not_alive(start, tmp_path):
    process = start(RUN_FOLDER=str(tmp_path))
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # dead, though its parent has not collected it
    assert processes_with({"RUN_FOLDER": str(tmp_path)}) == []
    assert kill_processes_with({"RUN_FOLDER": str(tmp_path)}) == []
