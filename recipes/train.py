"""One rank of one replica group: `torchrun -m recipes.train --job.config_file recipe.toml`; alone without torchrun.

`./run_train.sh` starts a whole run. Exit status: 0 the run is complete, 2 bad input, 75 told to stop (the same command
goes on from the last checkpoint), any other: a crash.
"""

# Before anything slow is imported: a rank must not outlive its parent, whenever that dies.
from recipes.stop import EXIT_BAD_INPUT, EXIT_STOPPED, Stopped, die_with_parent, stop_on_signals

if __name__ == "__main__":
    die_with_parent()

import gc
import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from isoloco.fleet import same_in_group
from isoloco.outer_round import RoundReport
from recipes.clip_gradients import clip_gradients
from recipes.command_line import parse_command
from recipes.config import Recipe, total_steps, warmup_steps
from recipes.evaluate import validation_loss
from recipes.inner_optimizer import reset_state, set_learning_rate
from recipes.loss import IGNORE_INDEX, cross_entropy_sum, sum_over_data_parallel
from recipes.lr_schedule import learning_rate
from recipes.metrics import Metrics, log_to_stdout
from recipes.profiling import Profiler, start_profiling
from recipes.rank import join_group
from recipes.replica_group import ReplicaGroup, build_replica_group
from recipes.run_files import FolderError, ReplicaFiles, lock_folder, write_atomically
from recipes.run_summary import summarize_files

logger = logging.getLogger("isoloco")


def train(group: ReplicaGroup) -> None:
    """Train until the run is complete: meet the others, train alone for a phase, meet again."""
    recipe, outer = group.recipe, group.outer
    has_nothing = outer.round == 0
    report = outer.start()
    if has_nothing and group.rank.rank == 0:
        group.files.go_back_to(0, 0)  # rows of an attempt that left nothing to go on from
    after_meeting(group, report)
    if outer.step == 0:
        measure_validation(group)
    profiler = start_profiling(recipe, group.files.folder, group.rank.rank)
    gc.disable()
    while not outer.finished:
        boundary = outer.step
        report = inner_phase(group, profiler)
        after_meeting(group, report)
        group.checkpoints.raise_if_failed()
        interval_has_ended = outer.step // recipe.checkpoint.interval > boundary // recipe.checkpoint.interval
        if recipe.checkpoint.enable and (interval_has_ended or outer.finished):
            group.checkpoints.save(outer.round, outer.state_dict(), group.model, group.optimizer)
    measure_validation(group)
    group.checkpoints.wait()


def inner_phase(group: ReplicaGroup, profiler: Profiler) -> RoundReport:
    """The inner steps from one meeting to the next, and that meeting. Reads the samples that this group was handed."""
    recipe, outer = group.recipe, group.outer
    group.batches.assign(outer.ledger.grants[group.replica_id])
    micro_batches = iter(group.loader)
    if group.metrics is not None:
        group.metrics.begin_phase()
    for step in range(outer.step, outer.step + outer.steps_in_phase):
        lr = scheduled_lr(recipe, step)
        set_learning_rate(group.optimizer, lr)
        batch = [next(micro_batches).to(group.rank.device) for _ in range(group.num_micro_batches)]
        loss_sum, num_tokens, grad_norm = inner_step(group, batch)
        profiler.step()
        if group.metrics is not None:
            values = {"loss": loss_sum / num_tokens, "grad_norm": grad_norm}
            group.metrics.inner_step(step + 1, outer.round + 1, lr=lr, values=values)
        if (step + 1) % recipe.training.gc_freq == 0:
            gc.collect()
        report = outer.after_step([group.batch_size * recipe.training.seq_len], [loss_sum])
    assert report is not None, "an inner phase ends with a meeting"
    return report


def inner_step(
    group: ReplicaGroup,
    batch: Sequence[Tensor],  # micro-batches of this rank, each (B, T + 1) int64
) -> tuple[Tensor, Tensor, Tensor]:
    """One optimizer step of the group. Returns its sum of losses, its number of tokens and its gradient norm."""
    labels = [tokens[:, 1:] for tokens in batch]
    num_tokens = torch.stack([(label != IGNORE_INDEX).sum() for label in labels]).sum()
    num_tokens = sum_over_data_parallel(num_tokens, group.mesh)
    loss_sum = torch.zeros((), device=num_tokens.device)
    for tokens, label in zip(batch, labels, strict=True):
        loss = cross_entropy_sum(group.model(tokens[:, :-1]), label)
        (loss / num_tokens).backward()
        loss_sum += loss.detach()
    grad_norm = clip_gradients(group.model.parameters(), group.recipe.training.max_norm, group.mesh)
    group.optimizer.step()
    group.optimizer.zero_grad()
    return sum_over_data_parallel(loss_sum, group.mesh), num_tokens, grad_norm


def scheduled_lr(recipe: Recipe, step: int) -> float:
    """The learning rate of inner step ``step`` (from 0)."""
    return learning_rate(
        step,
        base_lr=recipe.optimizer.lr,
        total_steps=total_steps(recipe),
        warmup_steps=warmup_steps(recipe),
        warmup_start_factor=recipe.lr_scheduler.warmup_start_factor,
        decay_type=recipe.lr_scheduler.decay_type,
        min_lr_factor=recipe.lr_scheduler.min_lr_factor,
    )


def after_meeting(group: ReplicaGroup, report: RoundReport) -> None:
    """Record a meeting, and drop the inner optimizer's state where it is spoilt or shall not outlive a heal."""
    if group.metrics is not None:
        group.metrics.outer_round(report)
    elif report.committed:  # for the launchers of a group's other nodes
        logger.info("round %d committed at step %d", report.round, report.step)
    starts_afresh = group.recipe.fault_tolerance.joiner_inner_state == "fresh"
    if report.reset_inner or (report.healed_from is not None and starts_afresh):
        reset_state(group.optimizer)


def measure_validation(group: ReplicaGroup) -> None:
    """Measure the loss on held-out text, unless the files have it already for this step."""
    step = group.outer.step
    measured = any(row["step"] == step for row in group.files.read("validation.jsonl"))
    if group.validation is None or same_in_group(measured, group.rank.control):
        return
    loss = validation_loss(
        group.model,
        group.validation,
        num_batches=group.recipe.validation.steps,
        local_batch_size=group.recipe.validation.local_batch_size,
        mesh=group.mesh,
        dp_rank=group.dp_rank,
        dp_degree=group.dp_degree,
        device=group.rank.device,
    )
    if group.metrics is not None:
        group.metrics.validation(step, group.outer.round, loss)


def write_summary(group: ReplicaGroup, metrics: Metrics, status: str) -> None:
    """This group's ``summary.json``."""
    seconds = time.monotonic() - metrics.started
    summary: dict[str, Any] = {
        "status": status,
        **summarize_files(group.files),
        "steps": group.outer.step,
        "rounds": group.outer.round,
        "tokens": group.outer.committed_tokens,
        "goodput": metrics.productive_seconds / seconds,
        "seconds": seconds,
        "faults": metrics.faults,
        "run_id": group.outer.run_id,
    }
    write_atomically(group.files.folder / "summary.json", json.dumps(summary, indent=2) + "\n")


def main(arguments: Sequence[str]) -> None:
    command, recipe = parse_command(arguments)
    if "REPLICA_ID" in os.environ:
        recipe.fault_tolerance.replica_id = int(os.environ["REPLICA_ID"])
    rank_number = int(os.environ.get("RANK", "0"))
    log_rank = os.environ.get("LOG_RANK", "0")
    if os.environ.get("LOCAL_RANK", "0") == "0":
        log_rank += f",{rank_number}"  # one rank per node tells the launcher there how the run goes
    log_to_stdout(recipe.fault_tolerance.replica_id, rank_number, log_rank)
    stop_on_signals(recipe.checkpoint.grace)
    files = ReplicaFiles(recipe.job.dump_folder, recipe.fault_tolerance.replica_id)
    lock = lock_when_free(files.folder) if rank_number == 0 else None
    group = build_replica_group(recipe, command, join_group(recipe))
    status = "failed"
    try:
        train(group)
        status = "completed"
    except Stopped:
        status = "stopped"
        group.checkpoints.wait()
        raise
    finally:
        if group.metrics is not None:
            write_summary(group, group.metrics, status)
            group.metrics.close()
    if lock is not None:
        lock.close()


def lock_when_free(folder: Path) -> IO[str]:
    """Take the group's folder; a process of the same group that was just killed may hold it for a moment."""
    deadline = time.monotonic() + 10
    while True:
        try:
            return lock_folder(folder)
        except FolderError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def tell(level: int, reason: str) -> None:
    """Say on one line why this rank ends."""
    line = next(iter(reason.strip().splitlines()), "no reason given")[:500]
    if logger.handlers:
        logger.log(level, "%s", line)
    else:  # it ends before it knows which group it is
        print(f"error: {line}", file=sys.stderr)


def run() -> None:
    """The process from its first line to its end. Leaves by os._exit: libraries' threads must not keep it alive."""
    status = 0
    try:
        main(sys.argv[1:])
    except Stopped as stopped:
        logger.info("stopped by %s; the same command goes on from the last checkpoint", stopped)
        status = EXIT_STOPPED
    except ValueError as error:
        if "--debug" in sys.argv:
            traceback.print_exc()
        tell(logging.CRITICAL, str(error))  # a restart would fail in the same way
        status = EXIT_BAD_INPUT
    except Exception as error:
        tell(logging.ERROR, f"rank {os.environ.get('RANK', '0')} crashed with {type(error).__name__}: {error}")
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    run()
