"""A run that is stopped, or killed with everything, goes on as if nothing had happened: bit for bit on a CPU."""

import signal
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.training_run import ONE_RANK, SMALL, console, rows, running, summary, train, wait_until
from tools.kill_group import processes_of_group

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = ("--training.steps", "30", "--metrics.log_freq", "1")
LAYOUTS = {
    "two-groups-of-one-rank": (*ONE_RANK,),
    "one-group-of-tp2": (
        *("--fault_tolerance.num_replica_groups", "1"),
        *("--parallelism.data_parallel_shard_degree", "1", "--parallelism.tensor_parallel_degree", "2"),
    ),
}


def state_at_end(folder: Path, replica: int, scratch: Path) -> dict[str, torch.Tensor]:
    """Everything in the last checkpoint, by name: reference parameters, momentum, inner optimizer, generators."""
    dcp_to_torch_save(folder / "checkpoint" / "round-6" / f"replica_{replica}", scratch)
    return flat(torch.load(scratch), "")


def flat(tree: object, path: str) -> dict[str, torch.Tensor]:
    if not isinstance(tree, dict):
        return {path: tree if isinstance(tree, torch.Tensor) else torch.tensor(tree)} if path else {}
    return {key: leaf for name, branch in tree.items() for key, leaf in flat(branch, f"{path}/{name}").items()}


def history(folder: Path, replica: int) -> dict[str, list[dict]]:
    """The run's files without what depends on the clock."""
    wanted = {
        "metrics.jsonl": ("step", "round", "loss", "lr", "grad_norm", "tokens"),
        "rounds.jsonl": ("round", "step", "digest", "participants", "weight", "loss", "tokens"),
        "ledger.jsonl": ("round", "epoch", "replica", "samples"),
        "validation.jsonl": ("step", "validation_loss"),
    }
    return {
        name: [{key: row[key] for key in keys} for row in rows(folder, replica, name)] for name, keys in wanted.items()
    }


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_stopped_run_and_a_killed_run_equal_the_one_that_was_never_interrupted(tmp_path, layout):
    flags = (*SMALL, *layout, *STEPS)
    undisturbed, stopped, killed = tmp_path / "undisturbed", tmp_path / "stopped", tmp_path / "killed"
    train(undisturbed, *flags)

    with running(stopped, *flags) as launcher:
        wait_until(lambda: (stopped / "checkpoint/round-2/replica_0/checkpoint.json").exists(), "two checkpoints")
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(timeout=30) == 75
    assert summary(stopped)["status"] == "stopped"
    train(stopped, *flags)

    with running(killed, *flags) as launcher:
        wait_until(lambda: (killed / "checkpoint/round-3/replica_0/checkpoint.json").exists(), "three checkpoints")
        launcher.kill()
        wait_until(lambda: not processes_of_group(killed, 0), "its processes die with it", seconds=10)
    train(killed, *flags)

    for resumed in (stopped, killed):
        assert "restored round" in console(resumed)
        for replica in summary(undisturbed)["replicas"]:
            expected = state_at_end(undisturbed, int(replica), tmp_path / "expected.pt")
            found = state_at_end(resumed, int(replica), tmp_path / "found.pt")
            assert expected.keys() == found.keys()
            assert {"/outer", "/inner", "/rng"} <= {f"/{name.split('/')[1]}" for name in expected}
            different = [name for name in expected if not torch.equal(expected[name], found[name])]
            assert not different
            assert history(resumed, int(replica)) == history(undisturbed, int(replica))


def test_a_run_with_muon_goes_on_bit_for_bit(tmp_path):
    """A completed part is the cheapest interruption; its schedule is that of the whole."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    flags = (*SMALL, "--fault_tolerance.num_replica_groups", "1", "--parallelism.data_parallel_shard_degree", "2")
    flags += ("--optimizer.name", "Muon", "--optimizer.lr", "-1", "--outer.method", "diloco")
    flags += ("--lr_scheduler.total_steps", "30", "--metrics.log_freq", "1")
    printed = train(whole, *flags, "--training.steps", "30")
    assert "diloco outside, Muon inside" in printed
    assert "28 matrices in 28 parameters are orthogonalised; AdamW updates 11 parameters: tok_embeddings" in printed
    losses = [row["loss"] for row in rows(whole, 0, "metrics.jsonl")]
    assert losses[-1] < losses[0] - 0.5

    for steps in ("15", "30"):
        train(parts, *flags, "--training.steps", steps)
    expected, found = (state_at_end(folder, 0, tmp_path / "state.pt") for folder in (whole, parts))
    assert expected.keys() == found.keys()
    assert "/inner/state.layers.0.attention.wq.weight.momentum_buffer" in expected
    assert not [name for name in expected if not torch.equal(expected[name], found[name])]
    assert history(parts, 0)["rounds.jsonl"] == history(whole, 0)["rounds.jsonl"]


def test_a_completed_run_goes_on_with_more_steps(tmp_path):
    flags = (*SMALL, *ONE_RANK, "--fault_tolerance.num_replica_groups", "1")
    folder = tmp_path / "run"
    train(folder, *flags, "--training.steps", "7")
    assert [row["step"] for row in rows(folder, 0, "rounds.jsonl")] == [5, 7], "the remainder is a last, shorter round"
    train(folder, *flags, "--training.steps", "12")
    assert [row["step"] for row in rows(folder, 0, "rounds.jsonl")] == [5, 7, 12]
    assert summary(folder)["status"] == "completed"
    assert summary(folder)["steps"] == 12
