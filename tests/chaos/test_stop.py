"""A run that is told to stop, or whose launcher is killed, ends in time, leaves no process, and can go on."""

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from recipes.command_line import free_port
from recipes.run_processes import processes_with
from tests.training_run import ONE_RANK, SMALL, console, rows, running, summary, train, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

GRACE = 10.0
LONG = (*SMALL, *ONE_RANK, "--training.steps", "100000", "--checkpoint.grace", str(GRACE))


def processes(folder):
    return processes_with({"RUN_FOLDER": str(folder)})


def no_half_written_file(folder):
    return not [file for file in folder.rglob(".*") if not file.name.startswith((".lock", ".metadata"))]


@contextmanager
def lighthouse():
    """A lighthouse as a person starts one on the machine where the groups of several sites meet."""
    port = free_port()
    program = shutil.which("torchft_lighthouse", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    command = [program, "--bind", f"127.0.0.1:{port}", "--min_replicas", "1", "--heartbeat_timeout_ms", "2000"]
    command += ["--join_timeout_ms", "60000", "--quorum_tick_ms", "100"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield {"TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}", "LOCAL_ADDR": "127.0.0.1"}
        finally:
            process.kill()


class TestToldToStop:
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_in_an_inner_phase_it_stops_in_time_and_goes_on_later(self, tmp_path, number):
        folder = tmp_path / "run"
        with running(folder, *LONG, "--training.steps", "5000") as launcher:
            wait_until(lambda: len(rows(folder, 0, "rounds.jsonl")) >= 2, "two rounds")
            asked = time.monotonic()
            launcher.send_signal(number)
            assert launcher.wait(timeout=60) == 75
            assert time.monotonic() - asked < GRACE
        assert processes(folder) == []
        assert no_half_written_file(folder)
        assert summary(folder)["status"] == "stopped"
        assert summary(folder)["rounds"] >= 2
        assert "Traceback" not in console(folder)
        assert "run stopped: " in console(folder)

        if number == signal.SIGTERM:
            steps = 5 * (summary(folder)["rounds"] + 1)
            train(folder, *LONG, "--training.steps", str(steps))
            assert "restored round" in (folder / "replica_0" / "log.txt").read_text()
            assert summary(folder)["status"] == "completed"
            rounds = [row["round"] for row in rows(folder, 0, "rounds.jsonl")]
            assert rounds == list(range(1, steps // 5 + 1))

    def test_while_it_waits_for_another_group(self, tmp_path):
        folder = tmp_path / "run"
        with lighthouse() as where, running(folder, *LONG, environment={**where, "REPLICA_ID": "0"}) as launcher:
            wait_until(lambda: "waiting for 1 of 2 replica groups" in console(folder), "it waits for the other group")
            assert "missing [1]" in console(folder)
            asked = time.monotonic()
            launcher.send_signal(signal.SIGTERM)
            assert launcher.wait(timeout=60) == 75
            assert time.monotonic() - asked < GRACE
            assert processes(folder) == []
        assert summary(folder)["status"] == "stopped"
        assert "Traceback" not in console(folder)

    def test_before_its_ranks_are_up(self, tmp_path):
        folder = tmp_path / "run"
        with running(folder, *LONG) as launcher:
            wait_until(lambda: processes(folder), "the launcher starts the groups")
            launcher.send_signal(signal.SIGTERM)
            assert launcher.wait(timeout=60) == 75
        assert processes(folder) == []
        assert summary(folder)["status"] == "stopped"


@pytest.mark.parametrize("when", ["training", "starting"])
def test_a_killed_launcher_leaves_no_process(tmp_path, when):
    folder = tmp_path / "run"
    with running(folder, *LONG, "--data.num_workers", "1") as launcher:
        if when == "training":
            wait_until(lambda: rows(folder, 1, "rounds.jsonl"), "a round")
            wait_until(lambda: len(processes(folder)) >= 6, "a torchrun, a rank and a data loader for each group")
        else:
            wait_until(lambda: len(processes(folder)) >= 4, "a torchrun and a rank for each group")
        mark = {"LAUNCHER_PID": str(launcher.pid)}
        assert len(processes_with(mark)) == len(processes(folder)) + 1, "and the lighthouse"
        launcher.kill()
        wait_until(lambda: not processes_with(mark), "all are gone", seconds=10)
    assert no_half_written_file(folder)


class TestOneGroupPerLauncher:
    """What a person runs on each site of a real run."""

    def test_two_sites_and_one_that_arrives_late_complete_a_run_together(self, tmp_path):
        folder, flags = tmp_path / "run", (*SMALL, *ONE_RANK, "--training.steps", "15")
        with lighthouse() as where, ExitStack() as stack:
            launchers = [
                stack.enter_context(running(folder, *flags, environment={**where, "REPLICA_ID": group}))
                for group in ("0", "1")
            ]
            assert [launcher.wait(timeout=240) for launcher in launchers] == [0, 0], console(folder)
            told = summary(folder)
            with running(folder, *flags, environment={**where, "REPLICA_ID": "2"}) as late:
                assert late.wait(timeout=60) == 0
        assert "is complete" in console(folder).splitlines()[-1]
        assert summary(folder) == told
        assert (told["status"], told["rounds"], told["not_back"]) == ("completed", 3, [])
        assert {each["digest"] for each in told["replicas"].values()} == {told["digest"]}
        assert [row["participants"] for row in rows(folder, 1, "rounds.jsonl")] == [[0, 1]] * 3

    def test_a_group_on_two_nodes(self, tmp_path):
        """Here both nodes are this machine."""
        folder = tmp_path / "run"
        flags = (*SMALL, "--training.steps", "10", "--fault_tolerance.num_replica_groups", "1")
        environment = {
            **{"REPLICA_ID": "0", "NGPU": "2", "NNODES": "2", "LOCAL_ADDR": "127.0.0.1"},
            "RDZV_ENDPOINT": f"127.0.0.1:{free_port()}",
        }
        with (
            running(folder, *flags, environment={**environment, "NODE_RANK": "0"}) as first,
            running(folder, *flags, environment={**environment, "NODE_RANK": "1"}) as second,
        ):
            assert first.wait(timeout=240) == 0, console(folder)
            assert second.wait(timeout=30) == 0, console(folder)
        assert processes(folder) == []
        assert (summary(folder)["status"], summary(folder)["rounds"]) == ("completed", 2)
        # Each launcher hears one rank; which, the rendezvous decides.
        logs = [(folder / "replica_0" / name).read_text() for name in ("log.txt", "log.1.txt")]
        (of_rank_0,) = (log for log in logs if "group 0 INFO round 2 committed at step 10 by groups [0]" in log)
        (of_rank_1,) = (log for log in logs if "group 0 rank 1 INFO round 2 committed at step 10" in log)
        assert of_rank_0 is not of_rank_1


def test_a_completed_run_is_not_run_again_and_ranks_are_shown_as_asked(tmp_path):
    folder, flags = tmp_path / "run", (*SMALL, "--training.steps", "5", "--fault_tolerance.num_replica_groups", "1")
    with running(folder, *flags, environment={"LOG_RANK": "1"}) as launcher:
        assert launcher.wait(timeout=240) == 0, console(folder)
    first = console(folder)
    assert " rank 1 round 1 committed" in first
    assert "loss" not in first.partition("run completed")[0], "what rank 0 says is not shown"
    for noise in ("torchrun", "torch.distributed", "W1", "INFO]", "[rank", "Warning"):
        assert noise not in first

    files = {file: file.stat().st_mtime_ns for file in folder.rglob("*.json*")}
    started = time.monotonic()
    printed = train(folder, *flags)[len(first) :]
    assert time.monotonic() - started < 10
    assert printed.count("\n") == 1
    assert "is complete" in printed
    assert "--fresh" in printed
    assert {file: file.stat().st_mtime_ns for file in folder.rglob("*.json*")} == files

    printed = train(folder, *flags, "--fresh")[len(first) :]
    assert "run completed: 1 rounds" in printed
    assert len(rows(folder, 0, "rounds.jsonl")) == 1
    assert "--fresh" not in printed.partition("resume:")[2], "to go on is not to start over"
