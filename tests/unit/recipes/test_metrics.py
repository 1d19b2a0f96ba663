"""The rows that a run leaves behind: outside programs rely on these names."""

import logging
import math

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from isoloco.outer_round import RoundReport
from recipes.metrics import Metrics, log_to_stdout, peak_flops
from recipes.recipe_file import load_recipe
from recipes.run_files import ReplicaFiles

METRICS_KEYS = {"step", "round", "loss", "tokens", "tokens_per_second", "lr", "grad_norm", "time"}
ROUNDS_KEYS = {
    *("round", "step", "committed", "registered", "alive", "participants", "weight", "digest", "seconds"),
    *("bytes_sent", "bytes_received", "retries", "healed_from", "time"),
}
SECONDS_KEYS = {"quorum", "exchange", "orthogonalize", "apply", "wait"}


def make_metrics(tmp_path, step=0):
    recipe = load_recipe(None, ["--job.dump_folder", str(tmp_path), "--metrics.log_freq", "5"])
    files = ReplicaFiles(tmp_path, 0)
    metrics = Metrics(
        recipe, files, step=step, tokens_per_step=100, num_flops_per_token=6.0, num_ranks=1, device=torch.device("cpu")
    )
    metrics.begin_phase()
    return metrics, files


def make_report(round_number, **changes):
    ledger = {"round": round_number, "epoch": 0, "replica": 0, "samples": [[0, 4]]}
    values = {
        "round": round_number,
        "step": 15 * round_number,
        "committed": True,
        "registered": 2,
        "alive": 2,
        "participants": [0, 1],
        "weights": {0: 1.0, 1: 1.0},
        "digest": "00ff",
        "seconds": dict.fromkeys([*SECONDS_KEYS, "heal"], 0.25),
        "bytes_sent": 10,
        "bytes_received": 20,
        "retries": 0,
        "healed_from": None,
        "loss": 3.0,
        "tokens": 1500,
        "pseudo_gradient_norm": {0: 0.5},
        "cosine": {0: 0.9},
        "stable_rank": (2.0, 3.0),
        "ledger": [ledger],
    }
    return RoundReport(**(values | changes))


def test_a_row_per_log_step_with_the_contract_keys(tmp_path):
    metrics, files = make_metrics(tmp_path)
    for step in range(1, 11):
        metrics.inner_step(step, 1, lr=0.1, values={"loss": torch.tensor(2.0), "grad_norm": torch.tensor(1.5)})
    rows = files.read("metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 5, 10], "the first step, and every log_freq steps"
    assert all(row.keys() >= METRICS_KEYS for row in rows)
    assert rows[-1]["tokens"] == 1000
    assert (rows[-1]["loss"], rows[-1]["grad_norm"], rows[-1]["lr"]) == (2.0, 1.5, 0.1)
    assert "mfu" not in rows[-1], "no peak is made up for a CPU"


def test_values_are_read_only_when_a_row_is_due(tmp_path):
    class Unread:
        def __float__(self):
            raise AssertionError("reading makes the host wait for the device")

    metrics, _ = make_metrics(tmp_path)
    metrics.inner_step(2, 1, lr=0.1, values={"loss": Unread(), "grad_norm": Unread()})
    with pytest.raises(AssertionError, match="wait for the device"):
        metrics.inner_step(5, 1, lr=0.1, values={"loss": Unread(), "grad_norm": Unread()})


def test_a_row_per_committed_round_with_the_contract_keys(tmp_path):
    metrics, files = make_metrics(tmp_path)
    metrics.outer_round(make_report(0, committed=False))
    metrics.outer_round(make_report(1))
    (row,) = files.read("rounds.jsonl")
    assert row.keys() >= ROUNDS_KEYS
    assert row["seconds"].keys() >= SECONDS_KEYS
    assert (row["weight"], row["cosine"], row["pseudo_gradient_norm"]) == (1.0, 0.9, 0.5)
    (ledger,) = files.read("ledger.jsonl")
    assert ledger == {"round": 1, "epoch": 0, "replica": 0, "samples": [[0, 4]]}


def test_rounds_that_a_group_was_healed_over_have_rows_too(tmp_path):
    metrics, files = make_metrics(tmp_path)
    missed = [make_report(number).record() for number in (1, 2)]
    metrics.outer_round(make_report(3, healed_from=1, weights={0: 0.0, 1: 1.0}, participants=[1], missed=missed))
    rows = files.read("rounds.jsonl")
    assert [(row["round"], row["healed_from"]) for row in rows] == [(1, 1), (2, 1), (3, 1)]
    assert {row["weight"] for row in rows} == {0.0}
    assert all(row.keys() >= ROUNDS_KEYS for row in rows)
    assert [row["round"] for row in files.read("ledger.jsonl")] == [1, 2, 3]
    assert metrics.faults["heals"] == 1


def test_what_the_history_tells_is_what_the_reports_said(tmp_path):
    metrics, files = make_metrics(tmp_path)
    reports = [make_report(1), make_report(2)]
    for report in reports:
        metrics.outer_round(report)
    assert files.history() == [report.record() for report in reports]


def test_tensorboard_has_the_curves_and_no_replayed_points(tmp_path):
    """Case B92."""
    metrics, files = make_metrics(tmp_path)
    for step in (5, 10, 15):
        metrics.inner_step(step, 1, lr=0.1, values={"loss": 9.0, "grad_norm": 1.0})
    metrics.outer_round(make_report(1))
    metrics.close()
    resumed, _ = make_metrics(tmp_path, step=5)
    for step in (10, 15):
        resumed.inner_step(step, 1, lr=0.1, values={"loss": 2.0, "grad_norm": 1.0})
    resumed.close()
    events = EventAccumulator(str(files.folder / "tb")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("inner/loss")] == [(5, 9.0), (10, 2.0), (15, 2.0)]
    assert "outer/loss" in events.Tags()["scalars"]


def test_training_alone_is_a_loud_warning(tmp_path, caplog):
    """Case B02."""
    metrics, _ = make_metrics(tmp_path)
    metrics.outer_round(make_report(1, participants=[0]))
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    metrics.outer_round(make_report(2, participants=[0]))
    assert "this group trains alone" in caplog.text
    assert metrics.faults["solo_rounds"] == 2


def test_only_counted_phases_are_productive(tmp_path):
    metrics, _ = make_metrics(tmp_path)
    metrics.inner_step(2, 1, lr=0.1, values={})
    metrics.outer_round(make_report(1, weights={0: 0.0, 1: 1.0}, participants=[1]))
    assert metrics.productive_seconds == 0.0
    metrics.begin_phase()
    metrics.inner_step(3, 2, lr=0.1, values={})
    metrics.outer_round(make_report(2))
    assert metrics.productive_seconds > 0.0


def test_a_round_without_spectrum_or_loss_is_recorded(tmp_path):
    metrics, files = make_metrics(tmp_path)
    metrics.outer_round(make_report(1, stable_rank=None, loss=math.nan))
    assert files.read("rounds.jsonl")[0]["stable_rank_before"] is None


def test_no_peak_is_known_for_a_cpu():
    assert peak_flops(torch.device("cpu")) is None


@pytest.fixture
def restored_logger():
    logger = logging.getLogger("isoloco")
    before = logger.handlers, logger.propagate, logger.level
    yield logger
    logger.handlers, logger.propagate, logger.level = before


def test_log_rank_says_whose_lines_are_shown(capsys, restored_logger):
    log_to_stdout(3, rank=1, log_rank="0,1")
    restored_logger.info("hello")
    log_to_stdout(3, rank=1)
    restored_logger.info("quiet")
    printed = capsys.readouterr().out
    assert "group 3" in printed
    assert "hello" in printed
    assert "quiet" not in printed
