"""The files of a run stay one readable history through crashes, and a folder has one user."""

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes.run_files import FolderError, ReplicaFiles, lock_folder, make_folder, write_atomically

ROOT = Path(__file__).parents[3]


def round_row(number, **more):
    return {
        **{"round": number, "step": 2 * number, "committed": True, "participants": [0], "digest": f"{number:x}"},
        **{"tokens": 64, "alive": 1, "registered": 1, "seconds": {"wait": 0.1}},
        **more,
    }


class TestFolder:
    @pytest.mark.parametrize("place", ["{file}/run", "/proc/run"])
    def test_one_that_cannot_be_made_is_named_with_the_reason_and_the_key_to_change(self, tmp_path, place):
        file = tmp_path / "file"
        file.write_text("")
        folder = Path(place.format(file=file))
        with pytest.raises(FolderError, match=r"cannot be written to \(.+\); set job.dump_folder") as error:
            make_folder(folder)
        assert str(folder) in str(error.value)

    def test_is_made_with_its_parents_and_left_empty(self, tmp_path):
        make_folder(tmp_path / "a" / "b")
        make_folder(tmp_path / "a" / "b")
        assert list((tmp_path / "a" / "b").iterdir()) == []


class TestLock:
    def test_a_second_user_is_refused_with_the_first_ones_process_id(self, tmp_path):
        with (
            lock_folder(tmp_path),
            pytest.raises(FolderError, match=rf"in use by a run with process id {os.getpid()}\b"),
        ):
            lock_folder(tmp_path)
        lock_folder(tmp_path).close()  # free again

    def test_is_free_when_its_holder_was_killed(self, tmp_path):
        program = (
            "import sys, time; from pathlib import Path; from recipes.run_files import lock_folder;"
            f"held = lock_folder(Path({str(tmp_path)!r})); print('held', flush=True); time.sleep(60)"
        )
        with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=ROOT) as holder:
            assert holder.stdout.readline() == b"held\n"
            with pytest.raises(FolderError, match=rf"process id {holder.pid}\b"):
                lock_folder(tmp_path)
            holder.send_signal(signal.SIGKILL)
        lock_folder(tmp_path).close()

    def test_sharers_do_not_hinder_each_other_but_somebody_who_wants_it_alone(self, tmp_path):
        with (
            lock_folder(tmp_path, shared=True),
            lock_folder(tmp_path, shared=True),
            pytest.raises(FolderError, match=f"process id {os.getpid()}"),
        ):
            lock_folder(tmp_path)
        with lock_folder(tmp_path), pytest.raises(FolderError, match="in use"):
            lock_folder(tmp_path, shared=True)

    def test_of_earlier_holders_only_the_living_are_named(self, tmp_path):
        ended = subprocess.Popen([sys.executable, "-c", ""])
        ended.wait()
        (tmp_path / ".lock").write_text(f"{ended.pid}\n")
        with lock_folder(tmp_path, shared=True), pytest.raises(FolderError, match=f"process id {os.getpid()};"):
            lock_folder(tmp_path)

    def test_other_names_are_other_locks(self, tmp_path):
        with lock_folder(tmp_path, ".lock.0.0"), lock_folder(tmp_path, ".lock.1.0"):
            pass


class TestWriteAtomically:
    def test_replaces_the_content(self, tmp_path):
        file = tmp_path / "summary.json"
        write_atomically(file, "old and longer")
        write_atomically(file, "new")
        assert file.read_text() == "new"
        assert os.listdir(tmp_path) == ["summary.json"]

    def test_on_a_full_disk_the_old_content_stays_and_nothing_else(self, tmp_path, monkeypatch):
        def full(descriptor):
            raise OSError(errno.ENOSPC, "No space left on device")

        file = tmp_path / "summary.json"
        write_atomically(file, "old")
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(FolderError, match=r"summary.json: could not be written \(No space left on device\)"):
            write_atomically(file, "new")
        assert file.read_text() == "old"
        assert os.listdir(tmp_path) == ["summary.json"]


class TestRows:
    def test_come_back_in_order(self, tmp_path):
        files = ReplicaFiles(tmp_path, 3)
        files.append("rounds.jsonl", [{"round": 1, "who": "Δ\u2028\x85\x0b"}])
        files.append("rounds.jsonl", ({"round": number} for number in (2, 3)))
        files.append("rounds.jsonl", [])
        assert [row["round"] for row in files.read("rounds.jsonl")] == [1, 2, 3]
        assert files.read("rounds.jsonl")[0]["who"] == "Δ\u2028\x85\x0b"
        assert (tmp_path / "replica_3" / "rounds.jsonl").read_text().count("\n") == 3

    def test_of_a_file_that_does_not_exist_there_are_none(self, tmp_path):
        assert ReplicaFiles(tmp_path, 0).read("rounds.jsonl") == []

    @given(data=st.data())
    def test_a_crash_at_any_byte_costs_the_cut_row_alone_and_later_rows_are_whole(self, tmp_path_factory, data):
        files = ReplicaFiles(tmp_path_factory.mktemp("run"), 0)
        rows = [{"step": step, "text": "x" * step} for step in range(data.draw(st.integers(1, 4)))]
        files.append("metrics.jsonl", rows)
        file = files.folder / "metrics.jsonl"
        content = file.read_bytes()
        cut = data.draw(st.integers(0, len(content)))
        file.write_bytes(content[:cut])
        whole = content[:cut].count(b"\n")
        assert files.read("metrics.jsonl") == rows[:whole]
        files.append("metrics.jsonl", [{"step": 99}])
        assert files.read("metrics.jsonl") == [*rows[:whole], {"step": 99}]

    def test_a_spoilt_line_is_named(self, tmp_path):
        files = ReplicaFiles(tmp_path, 0)
        (files.folder / "rounds.jsonl").write_bytes(b'{"round": 1}\n\0\0\0\n{"round": 3}\n')
        with pytest.raises(FolderError, match=r"rounds.jsonl:2: not a row of JSON; repair or remove"):
            files.read("rounds.jsonl")


class TestGoingBack:
    @pytest.fixture
    def files(self, tmp_path):
        files = ReplicaFiles(tmp_path, 0)
        files.append("rounds.jsonl", [round_row(1), round_row(2), round_row(3)])
        files.append("ledger.jsonl", [{"round": n, "replica": 0, "samples": [[n, n + 1]]} for n in (1, 2, 3)])
        files.append("metrics.jsonl", [{"step": step} for step in range(1, 7)])
        files.append("validation.jsonl", [{"step": 0}, {"step": 6}])
        return files

    def test_moves_every_later_row_to_the_superseded_ones(self, files):
        files.go_back_to(2, 4)
        assert [row["round"] for row in files.read("rounds.jsonl")] == [1, 2]
        assert [row["round"] for row in files.read("ledger.jsonl")] == [1, 2]
        assert [row["step"] for row in files.read("metrics.jsonl")] == [1, 2, 3, 4]
        assert [row["step"] for row in files.read("validation.jsonl")] == [0]
        moved = files.read("superseded.jsonl")
        assert sorted((row["file"], row.get("round", row.get("step"))) for row in moved) == [
            *[("ledger.jsonl", 3), ("metrics.jsonl", 5), ("metrics.jsonl", 6), ("rounds.jsonl", 3)],
            ("validation.jsonl", 6),
        ]
        (moved_round,) = (row for row in moved if row["file"] == "rounds.jsonl")
        assert moved_round == {"file": "rounds.jsonl", **round_row(3)}

    def test_twice_is_as_once(self, files):
        files.go_back_to(2, 4)
        before = {file.name: file.read_bytes() for file in files.folder.iterdir()}
        files.go_back_to(2, 4)
        assert {file.name: file.read_bytes() for file in files.folder.iterdir()} == before

    def test_to_before_the_beginning_leaves_no_row(self, files):
        files.go_back_to(0, -1)
        for name in ("rounds.jsonl", "ledger.jsonl", "metrics.jsonl", "validation.jsonl"):
            assert files.read(name) == []
        assert len(files.read("superseded.jsonl")) == 3 + 3 + 6 + 2

    def test_history_tells_each_committed_round_with_its_ledger_rows(self, files):
        files.append("rounds.jsonl", [round_row(4, committed=False)])
        files.append("ledger.jsonl", [{"round": 3, "replica": 1, "samples": [[7, 9]]}])
        history = files.history()
        assert [record["round"] for record in history] == [1, 2, 3]
        assert history[0]["ledger"] == [{"round": 1, "replica": 0, "samples": [[1, 2]]}]
        assert [row["replica"] for row in history[2]["ledger"]] == [0, 1]
        assert json.loads(json.dumps(history)) == history
        assert "seconds" not in history[0], "a donor's own seconds are no part of what a joiner missed"
