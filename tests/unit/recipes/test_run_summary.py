"""The run's summary is made of what its groups left in this launch, and never tells of an earlier one as this one's."""

import json

import pytest

from recipes.recipe_file import load_recipe
from recipes.run_files import ReplicaFiles
from recipes.run_summary import SummaryFiles, describe_end, mean_seconds, summarize_files


def row(number, seconds=0.0, **more):
    return {
        "round": number,
        "step": 5 * number,
        "tokens": 100,
        "digest": f"d{number}",
        "seconds": {"wait": seconds},
    } | more


def write_replica(folder, group, **more):
    """What a rank 0 writes when it ends."""
    files = ReplicaFiles(folder, group)
    summary = (
        summarize_files(files) | {"status": "completed", "goodput": 0.5, "faults": {"heals": 1}, "run_id": "r1"} | more
    )
    (files.folder / "summary.json").write_text(json.dumps(summary))


class TestOfOneGroup:
    def test_tells_what_the_files_tell(self, tmp_path):
        files = ReplicaFiles(tmp_path, 2)
        files.append("rounds.jsonl", [row(1, 2.0, loss=8.0), row(2), row(3, 4.0, loss=7.0)])
        files.append("validation.jsonl", [{"step": 0, "validation_loss": 8.5}, {"step": 15, "validation_loss": 7.5}])
        assert summarize_files(files) == {
            **{"replica_id": 2, "steps": 15, "rounds": 3, "tokens": 300, "first_loss": 8.0, "final_loss": 7.0},
            **{"validation_loss_before": 8.5, "validation_loss": 7.5, "digest": "d3", "round_seconds": {"wait": 3.0}},
        }

    def test_of_no_files_is_nothing(self, tmp_path):
        summary = summarize_files(ReplicaFiles(tmp_path, 0))
        assert (summary["rounds"], summary["tokens"], summary["digest"], summary["round_seconds"]) == (0, 0, None, {})
        assert summary["validation_loss_before"] is None
        assert summary["final_loss"] is None

    def test_a_loss_before_the_first_step_is_not_the_result(self, tmp_path):
        files = ReplicaFiles(tmp_path, 0)
        files.append("validation.jsonl", [{"step": 0, "validation_loss": 8.5}])
        summary = summarize_files(files)
        assert (summary["validation_loss_before"], summary["validation_loss"]) == (8.5, None)

    def test_seconds_are_the_mean_over_the_rounds_that_it_went_through_itself(self):
        own = [{"seconds": {"wait": 1.0, "quorum": 0.0}}, {"seconds": {"wait": 3.0, "quorum": 1.0}}]
        missed = [{"seconds": {"wait": 0.0, "quorum": 0.0}}] * 6
        assert mean_seconds([*own, *missed]) == {"wait": 2.0, "quorum": 0.5}


class TestMerge:
    def test_groups_that_completed_speak_for_the_run(self, tmp_path):
        files = SummaryFiles.before_launch(tmp_path, [0, 1])
        ReplicaFiles(tmp_path, 0).append("rounds.jsonl", [row(1), row(2), row(3)])
        ReplicaFiles(tmp_path, 1).append("rounds.jsonl", [row(1), row(2)])
        write_replica(tmp_path, 0, status="stopped")
        write_replica(tmp_path, 1)
        summary = files.merge("completed", {0: False, 1: True}, restarts=4)
        assert (summary["status"], summary["rounds"], summary["digest"]) == ("completed", 2, "d2")
        assert summary["faults"] == {"restarts": 4, "heals": 2}
        assert summary["not_back"] == [0]
        assert set(summary["replicas"]) == {"0", "1"}

    def test_without_one_the_group_that_came_farthest_does(self, tmp_path):
        files = SummaryFiles.before_launch(tmp_path, [0, 1])
        ReplicaFiles(tmp_path, 1).append("rounds.jsonl", [row(1)])
        write_replica(tmp_path, 0, status="stopped")
        write_replica(tmp_path, 1, status="stopped")
        assert files.merge("stopped", {0: False, 1: False}, 0)["rounds"] == 1

    def test_a_summary_from_before_the_launch_is_not_believed(self, tmp_path):
        write_replica(tmp_path, 0, status="completed", rounds=9)
        files = SummaryFiles.before_launch(tmp_path, [0])
        assert files.of_this_launch() == {}
        summary = files.merge("failed", {0: False}, 0)
        assert summary["replicas"]["0"]["status"] == "failed"
        assert summary["rounds"] == 0

    def test_a_group_that_could_not_write_its_own_is_told_from_its_rows(self, tmp_path):
        ReplicaFiles(tmp_path, 0).append("rounds.jsonl", [row(1), row(2, loss=7.0)])
        summary = SummaryFiles.before_launch(tmp_path, [0]).merge("stopped", {0: False}, 0)
        assert (summary["status"], summary["rounds"], summary["final_loss"], summary["goodput"]) == (
            "stopped",
            2,
            7.0,
            None,
        )
        assert summary["replicas"]["0"]["status"] == "stopped"

    def test_of_a_completed_run_a_group_that_did_not_complete_says_so(self, tmp_path):
        ReplicaFiles(tmp_path, 1).append("rounds.jsonl", [row(1)])
        files = SummaryFiles.before_launch(tmp_path, [0, 1])
        write_replica(tmp_path, 0)
        assert files.merge("completed", {0: True, 1: False}, 0)["replicas"]["1"]["status"] == "failed"

    def test_a_group_that_left_nothing_is_not_invented(self, tmp_path):
        summary = SummaryFiles.before_launch(tmp_path, [0]).merge("failed", {0: False}, 3)
        assert summary["replicas"] == {}
        assert (summary["status"], summary["rounds"], summary["faults"]) == ("failed", None, {"restarts": 3})
        assert not (tmp_path / "replica_0").exists()

    def test_groups_of_the_same_run_that_another_launcher_started_here_are_included(self, tmp_path):
        write_replica(tmp_path, 1)
        write_replica(tmp_path, 2, run_id="another")
        files = SummaryFiles.before_launch(tmp_path, [0])
        write_replica(tmp_path, 0)
        summary = files.merge("completed", {0: True}, 0)
        assert set(summary["replicas"]) == {"0", "1"}

    def test_is_written_whole(self, tmp_path):
        files = SummaryFiles.before_launch(tmp_path, [0])
        files.write({"status": "stopped"})
        assert files.read() == {"status": "stopped"}
        assert [file.name for file in tmp_path.iterdir()] == ["summary.json"]


class TestForAPerson:
    @pytest.fixture
    def summary(self, tmp_path):
        files = SummaryFiles.before_launch(tmp_path, [0, 1])
        for group in (0, 1):
            rows = ReplicaFiles(tmp_path, group)
            rows.append("rounds.jsonl", [row(1, 2.0, loss=8.0), row(2, 1.0, loss=6.0)])
            rows.append("validation.jsonl", [{"step": 0, "validation_loss": 8.0}, {"step": 10, "validation_loss": 6.0}])
            write_replica(tmp_path, group)
        return files.merge("completed", {0: True, 1: True}, 1)

    def test_says_what_came_of_it_and_what_to_do_next(self, summary):
        recipe = load_recipe(None, ["--job.dump_folder", "runs/a"])
        text = describe_end(summary, recipe, {"resume": "./run_train.sh", "watch": "tensorboard"})
        for part in (
            *("run completed: 2 rounds, 200 tokens", "8.0000 -> 6.0000 (75%)", "wait 1.50", "1 restarts, 2 heals"),
            *(
                "d2 (all groups equal)",
                "runs/a/replica_*/tb",
                "runs/a/checkpoint",
                "resume:",
                "./run_train.sh",
                "watch:",
            ),
        ):
            assert part in text

    def test_different_digests_are_not_called_equal(self, summary):
        summary["replicas"]["1"]["digest"] = "ffff"
        text = describe_end(summary, load_recipe(None, []), {})
        assert "d2, ffff" in text
        assert "equal" not in text

    def test_has_no_place_for_what_was_not_measured(self, tmp_path):
        summary = SummaryFiles.before_launch(tmp_path, [0]).merge("stopped", {0: False}, 0)
        flags = ["--metrics.enable_tensorboard", "false", "--checkpoint.enable", "false"]
        text = describe_end(summary, load_recipe(None, flags), {"resume": "x"})
        assert "run stopped: 0 rounds, 0 tokens" in text
        for absent in ("TensorBoard", "checkpoints", "validation", "digest", "None"):
            assert absent not in text
