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
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from isoloco.fleet import Fleet, SoloFleet, same_in_group
from isoloco.ledger import Ledger
from isoloco.outer_optimizer import OuterOptimizer
from isoloco.outer_round import OuterRound, RoundReport
from recipes.checkpoint import Checkpoints
from recipes.clip_gradients import clip_gradients
from recipes.command_line import Command, free_port, parse_command
from recipes.config import Recipe, global_batch_size, min_replica_groups, ranks_per_group, total_steps, warmup_steps
from recipes.data import PackedSamples, RoundBatches, build_loader, read_documents
from recipes.evaluate import validation_loss
from recipes.init_weights import initialize
from recipes.inner_optimizer import build_inner_optimizer, set_learning_rate
from recipes.loss import IGNORE_INDEX, cross_entropy_sum, sum_over_data_parallel
from recipes.lr_schedule import learning_rate
from recipes.metrics import Metrics, log_to_stdout
from recipes.model import Llama
from recipes.model_shape import FLAVORS, num_flops_per_token
from recipes.parallelize import build_mesh, parallelize
from recipes.profiling import start_profiling
from recipes.recipe_file import hashed_items
from recipes.run_files import ReplicaFiles, lock_folder, write_atomically
from recipes.tokenizer import load_tokenizer

logger = logging.getLogger("isoloco")


class LaunchError(ValueError):
    """The process was not started the way it has to be."""


@dataclass(frozen=True)
class Rank:
    """Where this process stands inside its replica group."""

    rank: int
    num_ranks: int
    device: torch.device
    control: dist.ProcessGroup  # gloo, for decisions and for tensors on the CPU
    background: dist.ProcessGroup  # gloo, for what a thread does while training goes on


def train(recipe: Recipe, command: Command, rank: Rank) -> None:
    """Train this rank's share of one replica group until the run is complete."""
    replica_id = recipe.fault_tolerance.replica_id
    files = ReplicaFiles(recipe.job.dump_folder, replica_id)
    torch.manual_seed(recipe.training.seed)
    samples, validation = load_data(recipe)
    dp_shard, tp = ranks_per_group(recipe, rank.num_ranks)
    dp_rank = rank.rank // tp
    mesh = build_mesh(dp_shard, tp, rank.device.type)
    model = build_model(recipe, mesh, rank.device)
    optimizer = build_inner_optimizer(model, recipe.optimizer)
    batch_size = global_batch_size(recipe, dp_shard)
    batches = RoundBatches(
        local_batch_size=recipe.training.local_batch_size,
        global_batch_size=batch_size,
        dp_rank=dp_rank,
        dp_degree=dp_shard,
    )
    num_micro_batches = batch_size // (dp_shard * batches.local_batch_size)
    loader = build_loader(samples, batches, recipe.data.num_workers)
    checkpoints = build_checkpoints(recipe, command, model, files, rank)
    outer = build_outer(recipe, command, model, optimizer, samples, batch_size, files, checkpoints, rank)
    metrics = Metrics(
        recipe,
        files,
        step=outer.step,
        tokens_per_step=batch_size * recipe.training.seq_len,
        num_flops_per_token=num_flops_per_token(FLAVORS[recipe.model.flavor], recipe.training.seq_len),
        num_ranks=rank.num_ranks,
        device=rank.device,
    ) if rank.rank == 0 else None  # fmt: skip
    measure = partial(measure_validation, recipe, model, validation, mesh, dp_rank, dp_shard, rank, files, metrics)
    status = "failed"
    try:
        has_nothing = outer.round == 0
        report = outer.start()
        if has_nothing and rank.rank == 0:
            files.go_back_to(0, 0)  # rows of an attempt that left nothing to go on from
        after_meeting(report, recipe, optimizer, metrics)
        if outer.step == 0:
            measure(outer)
        saved_at = outer.step
        profiler = start_profiling(recipe, files.folder, rank.rank)
        gc.disable()
        while not outer.finished:
            batches.assign(outer.ledger.grants[replica_id])
            stream = iter(loader)
            boundary = outer.step
            for step in range(boundary, boundary + outer.steps_in_phase):
                started = time.perf_counter()
                lr = scheduled_lr(recipe, step)
                set_learning_rate(optimizer, lr)
                micro_batches = [next(stream).to(rank.device) for _ in range(num_micro_batches)]
                loss_sum, num_tokens, grad_norm = inner_step(model, optimizer, micro_batches, recipe, mesh)
                profiler.step()
                if metrics is not None:
                    values = {"loss": loss_sum / num_tokens, "grad_norm": grad_norm}
                    metrics.inner_step(step + 1, outer.round + 1, time.perf_counter() - started, lr=lr, values=values)
                if (step + 1) % recipe.training.gc_freq == 0:
                    gc.collect()
                meeting = outer.after_step([batch_size * recipe.training.seq_len], [loss_sum])
            assert meeting is not None, "an inner phase ends with a meeting"
            after_meeting(meeting, recipe, optimizer, metrics)
            if recipe.checkpoint.enable and (outer.step - saved_at >= recipe.checkpoint.interval or outer.finished):
                checkpoints.save(outer.round, outer.state_dict(), model, optimizer)
                saved_at = outer.step
        measure(outer)
        checkpoints.wait()
        status = "completed"
    except Stopped:
        status = "stopped"
        raise
    finally:
        if metrics is not None:
            write_summary(status, outer, metrics, files)
            metrics.close()


def inner_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    micro_batches: Sequence[Tensor],  # each (B, T + 1) int64
    recipe: Recipe,
    mesh: DeviceMesh | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """One optimizer step of the group. Returns its sum of losses, its number of tokens and its gradient norm."""
    labels = [tokens[:, 1:] for tokens in micro_batches]
    num_tokens = sum_over_data_parallel(torch.stack([(each != IGNORE_INDEX).sum() for each in labels]).sum(), mesh)
    loss_sum = torch.zeros((), device=num_tokens.device)
    for tokens, label in zip(micro_batches, labels, strict=True):
        loss = cross_entropy_sum(model(tokens[:, :-1]), label)
        (loss / num_tokens).backward()
        loss_sum += loss.detach()
    grad_norm = clip_gradients(model.parameters(), recipe.training.max_norm, mesh)
    optimizer.step()
    optimizer.zero_grad()
    return sum_over_data_parallel(loss_sum, mesh), num_tokens, grad_norm


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


def load_data(recipe: Recipe) -> tuple[PackedSamples, PackedSamples | None]:
    """The training samples, and those to validate on."""
    tokenizer = load_tokenizer(recipe.model.tokenizer_path)
    dp_shard, _ = ranks_per_group(recipe, int(os.environ["WORLD_SIZE"]))

    def pack(dataset: str, path: str, split: str, min_samples: int) -> PackedSamples:
        return PackedSamples(
            read_documents(dataset, path, recipe.data.text_key, split),
            tokenizer,
            seq_len=recipe.training.seq_len,
            seed=recipe.training.seed,
            vocab_size=FLAVORS[recipe.model.flavor].vocab_size,
            min_samples=min_samples,
            source=path or f"the {dataset} corpus",
        )

    training = pack(recipe.training.dataset, recipe.training.dataset_path, "train", global_batch_size(recipe, dp_shard))
    if not recipe.validation.enable:
        return training, None
    return training, pack(recipe.validation.dataset, recipe.validation.dataset_path, "val", 1)


def build_model(recipe: Recipe, mesh: DeviceMesh | None, device: torch.device) -> Llama:
    """The model, parallelised and initialised."""
    with torch.device("meta"):
        model = Llama(replace(FLAVORS[recipe.model.flavor], max_seq_len=recipe.training.seq_len))
    parallelize(model, mesh, recipe)
    initialize(model, recipe.training.seed, device)
    return model


def build_checkpoints(
    recipe: Recipe, command: Command, model: nn.Module, files: ReplicaFiles, rank: Rank
) -> Checkpoints:
    """This group's checkpoints; with ``--fresh``, none of the old ones, and empty run files."""
    checkpoints = Checkpoints(
        Path(recipe.job.dump_folder) / recipe.checkpoint.folder,
        recipe.fault_tolerance.replica_id,
        shapes={name: list(parameter.shape) for name, parameter in model.named_parameters()},
        group=rank.background,
        keep_latest_k=recipe.checkpoint.keep_latest_k,
    )
    if command.fresh:
        checkpoints.set_all_aside()
        if rank.rank == 0:
            files.go_back_to(0, -1)
        dist.barrier(group=rank.control)
    return checkpoints


def build_outer(
    recipe: Recipe,
    command: Command,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    samples: PackedSamples,
    batch_size: int,
    files: ReplicaFiles,
    checkpoints: Checkpoints,
    rank: Rank,
) -> OuterRound:
    """The outer rule, at the newest checkpoint if there is one, with the fleet that it meets."""
    settings, groups = recipe.outer, recipe.fault_tolerance
    restorable = same_in_group(checkpoints.restorable_rounds(), rank.control)

    def restore(round_number: int) -> None:
        outer.load_state_dict(checkpoints.load(round_number, outer.state_dict(), model, optimizer))
        checkpoints.go_back_to(round_number)
        if rank.rank == 0:
            files.go_back_to(round_number, outer.step)
        dist.barrier(group=rank.control)
        outer.history = files.history()
        logger.info("restored round %d, step %d", round_number, outer.step)

    outer = OuterRound(
        build_fleet(recipe, rank),
        [model.named_parameters()],
        partial(
            OuterOptimizer,
            lr=settings.lr,
            momentum=settings.momentum,
            momentum_kind=settings.momentum_kind,
            isotropic=settings.orthogonalizer if settings.method == "isoloco" else None,
            scale=settings.scale,
            clip=settings.clip or None,
            target=settings.target,
            exclude=settings.exclude,
            coefficients=settings.coefficients,
        ),
        Ledger(len(samples)),
        sync_steps=settings.sync_steps,
        total_steps=recipe.training.steps,
        samples_per_step=batch_size,
        config=hashed_items(recipe) | {"the data": samples.fingerprint},
        weights=settings.weights,
        num_replica_groups=groups.num_replica_groups,
        min_replica_size=min_replica_groups(recipe),
        group=rank.control,
        bucket_bytes=int(settings.bucket_mb * 2**20),
        start_wait_seconds=groups.start_wait_seconds,
        max_retries=groups.max_exchange_retries,
        restorable_rounds=restorable,
        restore=restore,
        lost=same_in_group(not restorable and bool(files.read("rounds.jsonl")), rank.control),
        waiting_hint=f"start a missing one with: TORCHFT_LIGHTHOUSE={os.environ.get('TORCHFT_LIGHTHOUSE', '')} "
        "REPLICA_ID=<its number> ./run_train.sh",
    )
    if restorable:
        restore(restorable[-1])
    return outer


def build_fleet(recipe: Recipe, rank: Rank) -> Fleet:
    """The other replica groups: found through the lighthouse, or nobody if there is none."""
    groups = recipe.fault_tolerance
    lighthouse = os.environ.get("TORCHFT_LIGHTHOUSE")
    if lighthouse is None:
        if groups.num_replica_groups > 1:
            raise LaunchError(
                f"fault_tolerance.num_replica_groups = {groups.num_replica_groups}, but TORCHFT_LIGHTHOUSE does not "
                "say where the groups meet: set it to http://host:port, or start the whole run with ./run_train.sh"
            )
        return SoloFleet(groups.replica_id, group=rank.control)
    from isoloco.torchft_fleet import TorchFTFleet

    return TorchFTFleet(
        replica_id=groups.replica_id,
        lighthouse=lighthouse,
        group=rank.control,
        rank=rank.rank,
        world_size=rank.num_ranks,
        store_host=os.environ["MASTER_ADDR"],
        store_port=int(os.environ["MASTER_PORT"]),
        backend=groups.process_group,
        timeout_seconds=groups.process_group_timeout_seconds,
        quorum_timeout_seconds=groups.quorum_timeout_seconds,
    )


def after_meeting(
    report: RoundReport, recipe: Recipe, optimizer: torch.optim.Optimizer, metrics: Metrics | None
) -> None:
    """Record a meeting, and drop the inner optimizer's state where it is spoilt or shall not outlive a heal."""
    if metrics is not None:
        metrics.outer_round(report)
    healed_afresh = report.healed_from is not None and recipe.fault_tolerance.joiner_inner_state == "fresh"
    if report.reset_inner or healed_afresh:
        optimizer.state.clear()


def measure_validation(
    recipe: Recipe,
    model: nn.Module,
    validation: PackedSamples | None,
    mesh: DeviceMesh | None,
    dp_rank: int,
    dp_degree: int,
    rank: Rank,
    files: ReplicaFiles,
    metrics: Metrics | None,
    outer: OuterRound,
) -> None:
    """Measure the loss on held-out text, unless the files have it already."""
    measured = any(row["step"] == outer.step for row in files.read("validation.jsonl"))
    if validation is None or same_in_group(measured, rank.control):
        return
    loss = validation_loss(
        model,
        validation,
        num_batches=recipe.validation.steps,
        local_batch_size=recipe.validation.local_batch_size,
        mesh=mesh,
        dp_rank=dp_rank,
        dp_degree=dp_degree,
        device=rank.device,
    )
    if metrics is not None:
        metrics.validation(outer.step, outer.round, loss)


def write_summary(status: str, outer: OuterRound, metrics: Metrics, files: ReplicaFiles) -> None:
    """This group's ``summary.json``."""
    validation = files.read("validation.jsonl")
    rounds = files.read("rounds.jsonl")
    seconds = time.monotonic() - metrics.started
    losses = [row["loss"] for row in rounds if "loss" in row]
    summary: dict[str, Any] = {
        "status": status,
        "replica_id": files.folder.name.removeprefix("replica_"),
        "steps": outer.step,
        "rounds": outer.round,
        "tokens": outer.committed_tokens,
        "first_loss": losses[0] if losses else None,
        "final_loss": losses[-1] if losses else None,
        "validation_loss_before": validation[0]["validation_loss"]
        if validation and validation[0]["step"] == 0
        else None,
        "validation_loss": validation[-1]["validation_loss"] if validation and validation[-1]["step"] > 0 else None,
        "goodput": metrics.productive_seconds / seconds,
        "seconds": seconds,
        "faults": metrics.faults | {"solo_rounds": metrics.num_solo_rounds},
        "digest": rounds[-1]["digest"] if rounds else None,
        "round_seconds": metrics.round_seconds,
        "run_id": outer.run_id,
    }
    write_atomically(files.folder / "summary.json", json.dumps(summary, indent=2) + "\n")


def join_group(recipe: Recipe) -> Rank:
    """Meet the other ranks of this group, as torchrun's environment says; without torchrun, a group of one."""
    if "RANK" not in os.environ:
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        os.environ["MASTER_PORT"] = str(free_port())
    for variable in ("LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        if variable not in os.environ:
            raise LaunchError(
                f"{variable} is not set although RANK is: start the ranks with torchrun or ./run_train.sh"
            )
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    ranks_per_group(recipe, num_ranks)
    on_gpu = torch.cuda.is_available() and torch.cuda.device_count() > int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    return Rank(rank, num_ranks, device, dist.new_group(backend="gloo"), dist.new_group(backend="gloo"))


def main(arguments: Sequence[str]) -> int:
    command, recipe = parse_command(arguments)
    if "REPLICA_ID" in os.environ:
        recipe.fault_tolerance.replica_id = int(os.environ["REPLICA_ID"])
    log_to_stdout(recipe.fault_tolerance.replica_id, int(os.environ.get("RANK", 0)))
    stop_on_signals(recipe.checkpoint.grace)
    if int(os.environ.get("RANK", 0)) == 0:
        lock = lock_when_free(ReplicaFiles(recipe.job.dump_folder, recipe.fault_tolerance.replica_id).folder)
    rank = join_group(recipe)
    train(recipe, command, rank)
    if rank.rank == 0:
        lock.close()
    return 0


def lock_when_free(folder: Path) -> Any:
    """Take the group's folder; a process of the same group that was just killed may hold it for a moment."""
    deadline = time.monotonic() + 10
    while True:
        try:
            return lock_folder(folder)
        except ValueError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def run() -> None:
    """The process from its first line to its end. Leaves by os._exit: libraries' threads must not keep it alive."""
    arguments = sys.argv[1:]
    try:
        status = main(arguments)
    except Stopped as stopped:
        logger.info("stopped by %s; the same command goes on from the last checkpoint", stopped)
        status = EXIT_STOPPED
    except ValueError as error:
        if "--debug" in arguments:
            traceback.print_exc()
        message = str(error).splitlines()[0]
        logger.error("%s", message)
        status = EXIT_BAD_INPUT
    except Exception:
        logger.exception("this rank crashed")
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    run()
