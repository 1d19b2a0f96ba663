"""kill -9 of every process of one group: the other goes on, the launcher restarts it, it is healed and counts again."""

import json
import os
import signal

import pytest

from tests.training_run import ONE_RANK, SMALL, committed_samples, rows, running, summary, wait_until
from tools.kill_group import processes_of_group

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def kill_group(folder, group):
    for process in processes_of_group(folder, group):
        os.kill(process, signal.SIGKILL)


# As many rounds as give the killed group several times what it needs to come back.
@pytest.mark.parametrize(("ranks", "num_rounds"), [(ONE_RANK, 60), ((), 40)], ids=["one-rank-groups", "fsdp2-groups"])
def test_a_killed_group_is_restarted_healed_and_counts_again(tmp_path, ranks, num_rounds):
    folder = tmp_path / "run"
    steps = str(5 * num_rounds)
    with running(folder, *SMALL, *ranks, "--training.steps", steps, "--checkpoint.interval", "50") as launcher:
        wait_until(lambda: len(rows(folder, 1, "rounds.jsonl")) >= 2, "group 1 commits two rounds")
        before = set(processes_of_group(folder, 1))
        assert before
        kill_group(folder, 1)
        wait_until(lambda: set(processes_of_group(folder, 1)) - before, "the launcher starts group 1 again")
        assert launcher.wait(timeout=600) == 0

    survivor, joiner = rows(folder, 0, "rounds.jsonl"), rows(folder, 1, "rounds.jsonl")
    told = summary(folder)
    assert told["status"] == "completed"
    assert told["faults"]["restarts"] == 1
    assert [row["round"] for row in survivor] == list(range(1, num_rounds + 1))
    assert [row["round"] for row in joiner] == list(range(1, num_rounds + 1)), "every round is committed or healed over"
    assert [row["digest"] for row in survivor] == [row["digest"] for row in joiner]

    alone = [row["round"] for row in survivor if row["participants"] == [0]]
    assert alone, "the survivor committed while the other was away"
    assert [row["round"] for row in joiner if row["healed_from"] == 0][-1] >= alone[0]
    heal = max(row["round"] for row in joiner if row["healed_from"] == 0)
    (healed_row,) = (row for row in survivor if row["round"] == heal)
    assert healed_row["participants"] == [0], "a joiner does not count in the round that heals it"
    assert all(row["participants"] == [0, 1] for row in survivor if row["round"] > heal)
    assert survivor[-1]["round"] > heal, "and it counts afterwards"

    ledger = rows(folder, 0, "ledger.jsonl")
    assert ledger == rows(folder, 1, "ledger.jsonl")
    marker = json.loads((folder / "checkpoint" / f"round-{num_rounds}" / "replica_0" / "checkpoint.json").read_text())
    at_end = marker["outer"]["ledger"]
    trained_on = committed_samples(ledger, at_end["samples_per_epoch"])
    assert told["tokens"] == len(trained_on) * 32
    not_trained_on = [s for start, stop in at_end["returned"] for s in range(start, stop)]
    assert at_end["grants"] == {"0": [], "1": []}, "nothing is handed out after the last round"
    assert sorted(trained_on + not_trained_on) == list(range(at_end["cursor"])), "no duplicate and no gap"
