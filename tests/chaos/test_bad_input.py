"""What is wrong with a run is one line with a remedy and a non-zero exit status, and leaves nothing behind."""

import gzip
import json
import os
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from recipes.command_line import free_port
from recipes.run_processes import processes_with
from tests.training_run import ONE_RANK, ROOT, SMALL, rows, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ONE_GROUP = ("--fault_tolerance.num_replica_groups", "1", *ONE_RANK)


@dataclass(frozen=True)
class Ended:
    """A program that has ended: its exit status and what it printed."""

    status: int
    out: str
    err: str


def run(program, folder, *flags, seconds=120, **environment):
    """Run a program on ``folder`` to its end, and see that none of its processes is left."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    result = subprocess.run(
        [*program, "--job.dump_folder", str(folder), *SMALL, *flags],
        cwd=ROOT,
        env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "RUN_FOLDER": "", **environment},
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert processes_with({"RUN_FOLDER": str(folder.resolve())}) == []
    return Ended(result.returncode, result.stdout, result.stderr)


def launch(folder, *flags, **environment):
    return run(["./run_train.sh"], folder, *flags, **environment)


def launched_in_vain(folder, *flags, status=2, **environment):
    """The one line that the launcher gives for its refusal."""
    ended = launch(folder, *flags, **environment)
    assert ended.status == status, ended
    assert "Traceback" not in ended.out + ended.err
    assert ended.err.count("\n") == 1, ended.err
    assert ended.err.startswith("error: ")
    return ended.err


def files_below(folder):
    """Files in a run's folder, but for the locks and the logs."""
    return sorted(
        str(file.relative_to(folder))
        for file in folder.rglob("*")
        if file.is_file() and not file.name.startswith(".lock") and file.suffix not in (".log", ".txt")
    )


def rank(folder, *flags):
    """One rank, without a launcher: quicker, and the errors of a rank are the same."""
    return run([sys.executable, "-m", "recipes.train"], folder, *ONE_GROUP, *flags)


def rank_in_vain(folder, *flags):
    """The one line that a rank gives for its refusal."""
    ended = rank(folder, *flags)
    assert ended.status == 2, ended
    assert "Traceback" not in ended.out + ended.err
    (line,) = (line for line in ended.out.splitlines() if " CRITICAL " in line or " ERROR " in line)
    assert "error" not in ended.err.lower()
    return line


@pytest.fixture
def text(tmp_path):
    """Make a text file and return the flags to train on it."""

    def text(name, content):
        (tmp_path / name).write_bytes(content)
        return ("--training.dataset", "text", "--training.dataset_path", str(tmp_path / name))

    return text


class TestRefusedBeforeAnythingStarts:
    @pytest.mark.parametrize(
        ("flags", "named"),
        [
            (["--outer.sync_step", "5"], ["outer.sync_step", "outer.sync_steps"]),
            (["--outer.sync_steps", "0"], ["outer.sync_steps = 0", "at least 1"]),
            (["--training.steps", "3"], ["training.steps = 3", "outer.sync_steps"]),
            (["--fault_tolerance.min_replica_size", "3"], ["min_replica_size = 3"]),
            (["--training.dataset", "text", "--training.dataset_path", "/no/such"], ["/no/such", "dataset_path"]),
            (["--model.tokenizer_path", "/no/such"], ["/no/such", "model.tokenizer_path"]),
            (["--model.tokenizer_path", "builtin:bpe8k"], ["8192", "4096", "model.flavor"]),
        ],
    )
    def test_a_recipe_that_cannot_work(self, tmp_path, flags, named):
        error = launched_in_vain(tmp_path / "run", *flags)
        assert all(part in error for part in named), error
        assert not (tmp_path / "run").exists()

    def test_a_tokenizer_file_that_is_none(self, tmp_path):
        (tmp_path / "tokens").write_text("not base64\n")
        error = launched_in_vain(tmp_path / "run", "--model.tokenizer_path", str(tmp_path / "tokens"))
        assert f"{tmp_path}/tokens:1: " in error

    @pytest.mark.parametrize("place", ["file/run", "/proc/run"])
    def test_a_folder_that_cannot_be_written_to(self, tmp_path, place):
        (tmp_path / "file").write_text("")
        error = launched_in_vain(tmp_path / place)
        assert str(tmp_path / place) in error
        assert "job.dump_folder" in error

    def test_a_lighthouse_without_a_group_number(self, tmp_path):
        error = launched_in_vain(tmp_path / "run", TORCHFT_LIGHTHOUSE="http://127.0.0.1:1")
        assert "REPLICA_ID" in error

    def test_a_lighthouse_that_is_not_there_within_30_seconds(self, tmp_path):
        address = f"http://127.0.0.1:{free_port()}"
        error = launched_in_vain(tmp_path / "run", TORCHFT_LIGHTHOUSE=address, REPLICA_ID="0", seconds=30)
        for part in (address, "Connection refused", "check that torchft_lighthouse runs", "firewall"):
            assert part in error
        assert files_below(tmp_path / "run") == []

    def test_a_port_in_use(self, tmp_path):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = str(listener.getsockname()[1])
            error = launched_in_vain(tmp_path / "run", "--fault_tolerance.lighthouse_port", port)
            assert f"fault_tolerance.lighthouse_port: port {port}" in error
            error = launched_in_vain(
                tmp_path / "run",
                *("--fault_tolerance.num_replica_groups", "1"),
                **{"REPLICA_ID": "0", "NNODES": "2", "NODE_RANK": "0", "RDZV_ENDPOINT": f"127.0.0.1:{port}"},
            )
            assert f"RDZV_ENDPOINT=127.0.0.1:{port}: port {port}" in error
        assert files_below(tmp_path / "run") == []


class TestRefusedByARank:
    @pytest.mark.parametrize(
        ("name", "content", "named"),
        [
            ("a.jsonl", b'{"text": "fine"}\n{"text": ', ["a.jsonl:2", "not JSON"]),
            ("a.jsonl.gz", gzip.compress(b'{"text": "fine"}\n' * 99)[:-12], ["a.jsonl.gz", "cannot be read"]),
            ("a.txt", b"fine\n\xff\xfe", ["a.txt:2", "UTF-8"]),
            ("a.txt", b"", ["a.txt", "empty"]),
            ("a.jsonl", b'{"text": "far too short"}\n', ["a.jsonl", "batch"]),
        ],
        ids=["malformed", "cut-short", "not-text", "empty", "shorter-than-one-batch"],
    )
    def test_text_that_cannot_be_trained_on(self, tmp_path, text, name, content, named):
        error = rank_in_vain(tmp_path / "run", *text(name, content))
        assert all(part in error for part in named), error
        assert files_below(tmp_path / "run") == []

    def test_a_run_of_several_groups_without_a_place_to_meet(self, tmp_path):
        error = rank_in_vain(tmp_path / "run", "--fault_tolerance.num_replica_groups", "2")
        assert "TORCHFT_LIGHTHOUSE" in error
        assert "./run_train.sh" in error

    def test_through_the_launcher_it_is_one_line_for_all_groups_and_ranks(self, tmp_path, text):
        folder = tmp_path / "run"
        error = launched_in_vain(folder, *text("a.jsonl", b"[1, 2]\n"))
        assert "a.jsonl:1: a JSON list" in error
        assert files_below(folder) == []

    def test_through_the_launcher_what_was_there_before_is_left_as_it_was(self, tmp_path, text):
        folder = tmp_path / "run"
        folder.mkdir()
        (folder / "config.toml").write_text("[training]\nsteps = 7\n")
        (folder / "summary.json").write_text('{"status": "completed"}')
        launched_in_vain(folder, *ONE_GROUP, *text("a.jsonl", b"[1, 2]\n"))
        assert files_below(folder) == ["config.toml", "summary.json"]
        assert (folder / "config.toml").read_text() == "[training]\nsteps = 7\n"
        assert (folder / "summary.json").read_text() == '{"status": "completed"}'


class TestCheckpoints:
    STEPS = ("--training.steps", "15")

    @pytest.fixture(scope="class")
    def complete(self, tmp_path_factory):
        folder = tmp_path_factory.mktemp("complete") / "run"
        ended = rank(folder, "--training.steps", "10")
        assert ended.status == 0, ended
        return folder

    @pytest.fixture
    def folder(self, complete, tmp_path):
        """A run of two rounds, each with its checkpoint."""
        return shutil.copytree(complete, tmp_path / "run")

    @staticmethod
    def cut_short(folder, number):
        (file, *_) = (folder / "checkpoint" / f"round-{number}" / "replica_0").glob("*.distcp")
        file.write_bytes(file.read_bytes()[:-100])

    def test_of_another_model_is_refused(self, folder):
        for marker in folder.glob("checkpoint/round-*/replica_0/checkpoint.json"):
            content = json.loads(marker.read_text())
            content["shapes"]["layers.0.attention.wq.weight"] = [64, 64]
            marker.write_text(json.dumps(content))
        before = {file: (folder / file).read_bytes() for file in files_below(folder)}
        error = rank_in_vain(folder, *self.STEPS)
        assert "the checkpoint is of another model (layers.0.attention.wq.weight is [64, 64] there" in error
        assert {file: (folder / file).read_bytes() for file in files_below(folder)} == before

    def test_the_only_one_cut_short_is_an_error_that_says_how_to_start_over(self, folder):
        shutil.rmtree(folder / "checkpoint" / "round-1")
        self.cut_short(folder, 2)
        error = rank_in_vain(folder, *self.STEPS)
        for part in ("round-2/replica_0", "cut short", "--fresh"):
            assert part in error
        assert len(rows(folder, 0, "rounds.jsonl")) == 2, "nothing was given up without being asked to"

    def test_the_newest_cut_short_is_skipped_with_the_reason_for_the_one_before(self, folder):
        self.cut_short(folder, 2)
        ended = rank(folder, *self.STEPS)
        assert ended.status == 0, ended
        (skipped,) = (line for line in ended.out.splitlines() if "WARNING" in line and "skipping" in line)
        assert "round-2/replica_0" in skipped
        assert "cut short" in skipped
        assert "restored round 1, step 5" in ended.out
        assert [row["round"] for row in rows(folder, 0, "rounds.jsonl")] == [1, 2, 3]
        assert [row["round"] for row in rows(folder, 0, "superseded.jsonl") if row["file"] == "rounds.jsonl"] == [2]

    def test_fresh_starts_over_and_loses_no_row(self, folder):
        ended = rank(folder, "--training.steps", "10", "--fresh")
        assert ended.status == 0, ended
        assert "restored" not in ended.out
        assert [row["round"] for row in rows(folder, 0, "rounds.jsonl")] == [1, 2]
        assert [row["round"] for row in rows(folder, 0, "superseded.jsonl") if row["file"] == "rounds.jsonl"] == [1, 2]


class TestRanksThatDie:
    def test_at_start_up_they_are_tried_again_up_to_the_cap(self, tmp_path):
        folder = tmp_path / "run"
        ended = launch(folder, *ONE_GROUP, "--fault_tolerance.max_restarts", "1", TRAIN_FILE="tests.chaos.dying_rank")
        assert ended.status == 1
        assert ended.err.count("\n") == 1
        assert "error: group 0 failed 2 times" in ended.err
        assert "fault_tolerance.max_restarts = 1" in ended.err
        assert f"see {folder}/replica_0/log.txt" in ended.err
        assert ended.out.count("starting it again in 1 s") == 1
        assert "Traceback" not in ended.out + ended.err
        assert json.loads((folder / "summary.json").read_text())["status"] == "failed"

    def test_a_module_that_does_not_exist_is_named_at_once(self, tmp_path):
        error = launched_in_vain(tmp_path / "run", TRAIN_FILE="recipes.trian")
        assert "TRAIN_FILE=recipes.trian" in error


def test_a_second_run_on_a_folder_in_use_is_refused_with_the_first_ones_process_id(tmp_path):
    folder = tmp_path / "run"
    with socket.create_server(("127.0.0.1", 0)) as silent:  # answers nobody: the first launcher waits for it
        lighthouse = f"http://127.0.0.1:{silent.getsockname()[1]}"
        first = subprocess.Popen(
            [sys.executable, "-m", "recipes.launch", "--job.dump_folder", str(folder)],
            cwd=ROOT,
            env={**os.environ, "TORCHFT_LIGHTHOUSE": lighthouse, "REPLICA_ID": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            wait_until(lambda: (folder / ".lock.1.0").exists(), "the first launcher takes the folder", seconds=30)
            for environment in ({}, {"TORCHFT_LIGHTHOUSE": lighthouse, "REPLICA_ID": "1"}):
                error = launched_in_vain(folder, **environment)
                assert f"in use by a run with process id {first.pid};" in error
        finally:
            first.kill()
            first.wait()
