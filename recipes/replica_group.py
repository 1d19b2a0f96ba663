"""One rank's share of a replica group: everything that its training loop needs, built from the recipe."""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torchdata.stateful_dataloader import StatefulDataLoader

from isoloco.aggregate import MEAN, Aggregation
from isoloco.fleet import Fleet, SoloFleet, same_in_group
from isoloco.ledger import Ledger
from isoloco.outer_optimizer import OuterOptimizer
from isoloco.outer_round import OuterRound
from recipes.checkpoint import Checkpoints
from recipes.command_line import Command
from recipes.config import (
    ISOTROPIC_METHODS,
    MERGING_METHODS,
    Outer,
    Recipe,
    global_batch_size,
    min_replica_groups,
    ranks_per_group,
)
from recipes.data import PackedSamples, RoundBatches, build_loader, read_documents
from recipes.init_weights import initialize
from recipes.inner_optimizer import build_inner_optimizer
from recipes.metrics import Metrics
from recipes.model import Llama
from recipes.model_shape import FLAVORS, num_flops_per_token
from recipes.parallelize import build_mesh, parallelize
from recipes.rank import LaunchError, Rank
from recipes.recipe_file import hashed_items
from recipes.run_files import ReplicaFiles
from recipes.tokenizer import load_tokenizer

logger = logging.getLogger("isoloco")


@dataclass
class ReplicaGroup:
    """The parts of one rank. ``validation`` is None if the recipe asks for none; only rank 0 has ``metrics``.

    ``batch_size``: samples per inner step of the whole group; slice ``dp_rank`` of ``dp_degree`` of it is read here.
    """

    recipe: Recipe
    rank: Rank
    files: ReplicaFiles
    mesh: DeviceMesh | None
    model: Llama
    optimizer: torch.optim.Optimizer
    batch_size: int
    dp_rank: int
    dp_degree: int
    batches: RoundBatches
    loader: StatefulDataLoader
    validation: PackedSamples | None
    checkpoints: Checkpoints
    outer: OuterRound
    metrics: Metrics | None

    @property
    def replica_id(self) -> int:
        return self.recipe.fault_tolerance.replica_id

    @property
    def num_micro_batches(self) -> int:
        return self.batch_size // (self.dp_degree * self.recipe.training.local_batch_size)


def build_replica_group(recipe: Recipe, command: Command, rank: Rank) -> ReplicaGroup:
    """Build it all, at the newest checkpoint if there is one. A collective of the group's ranks."""
    files = ReplicaFiles(recipe.job.dump_folder, recipe.fault_tolerance.replica_id)
    torch.manual_seed(recipe.training.seed)
    dp_degree, tp = ranks_per_group(recipe, rank.num_ranks)
    dp_rank, batch_size = rank.rank // tp, global_batch_size(recipe, dp_degree)
    samples, validation = load_data(recipe, batch_size)
    mesh = build_mesh(dp_degree, tp, rank.device.type)
    model = build_model(recipe, mesh, rank.device)
    optimizer = build_inner_optimizer(model, recipe.optimizer)
    batches = RoundBatches(
        local_batch_size=recipe.training.local_batch_size,
        global_batch_size=batch_size,
        dp_rank=dp_rank,
        dp_degree=dp_degree,
    )
    checkpoints = build_checkpoints(recipe, command, model, files, rank)
    outer = build_outer(recipe, model, optimizer, samples, batch_size, files, checkpoints, rank)
    metrics = None
    if rank.rank == 0:
        metrics = Metrics(
            recipe,
            files,
            step=outer.step,
            tokens_per_step=batch_size * recipe.training.seq_len,
            num_flops_per_token=num_flops_per_token(FLAVORS[recipe.model.flavor], recipe.training.seq_len),
            num_ranks=rank.num_ranks,
            device=rank.device,
        )
    return ReplicaGroup(
        recipe=recipe,
        rank=rank,
        files=files,
        mesh=mesh,
        model=model,
        optimizer=optimizer,
        batch_size=batch_size,
        dp_rank=dp_rank,
        dp_degree=dp_degree,
        batches=batches,
        loader=build_loader(samples, batches, recipe.data.num_workers),
        validation=validation,
        checkpoints=checkpoints,
        outer=outer,
        metrics=metrics,
    )


def load_data(recipe: Recipe, batch_size: int) -> tuple[PackedSamples, PackedSamples | None]:
    """The training samples, and those to validate on."""
    tokenizer = load_tokenizer(recipe.model.tokenizer_path)

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

    training = pack(recipe.training.dataset, recipe.training.dataset_path, "train", batch_size)
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


def build_checkpoints(recipe: Recipe, command: Command, model: Llama, files: ReplicaFiles, rank: Rank) -> Checkpoints:
    """This group's checkpoints; with ``--fresh``, none of the old ones, and empty run files."""
    checkpoints = Checkpoints(
        Path(recipe.job.dump_folder) / recipe.checkpoint.folder,
        recipe.fault_tolerance.replica_id,
        shapes={name: list(parameter.shape) for name, parameter in model.named_parameters()},
        group=rank.background,
        keep_latest_k=recipe.checkpoint.keep_latest_k,
    )
    if command.fresh and rank.rank == 0:
        checkpoints.set_all_aside()
        files.go_back_to(0, -1)
        logger.info("starting over: the checkpoints and rows of an earlier run are set aside")
    dist.barrier(group=rank.control)
    return checkpoints


def build_outer(
    recipe: Recipe,
    model: Llama,
    optimizer: torch.optim.Optimizer,
    samples: PackedSamples,
    batch_size: int,
    files: ReplicaFiles,
    checkpoints: Checkpoints,
    rank: Rank,
) -> OuterRound:
    """The outer rule, at the newest checkpoint if there is one, with the fleet that it meets."""
    settings, groups = recipe.outer, recipe.fault_tolerance
    bucket_bytes = int(settings.bucket_mb * 2**20)
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
            isotropic=settings.orthogonalizer if settings.method in ISOTROPIC_METHODS else None,
            scale=settings.scale,
            clip=settings.clip or None,
            target=settings.target,
            exclude=settings.exclude,
            coefficients=settings.coefficients,
            bucket_bytes=bucket_bytes,
            device=rank.device,
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
        aggregation=build_aggregation(settings),
        bucket_bytes=bucket_bytes,
        start_wait_seconds=groups.start_wait_seconds,
        max_retries=groups.max_exchange_retries,
        restorable_rounds=restorable,
        restore=restore,
        lost=same_in_group(not restorable and bool(files.read("rounds.jsonl")), rank.control),
        waiting_hint=waiting_hint(os.environ),
    )
    if restorable:
        restore(restorable[-1])
    return outer


def build_aggregation(settings: Outer) -> Aggregation:
    """How the groups' pseudo-gradients become one."""
    if settings.method not in MERGING_METHODS:
        return MEAN
    options: dict[str, float] = {}
    if settings.method in ("ties", "dare"):
        options["sparsity"] = settings.sparsity
    if settings.method == "iso_cts":
        options["common_space_fraction"] = settings.common_space_fraction
    return Aggregation(settings.method, options)


def waiting_hint(environment: Mapping[str, str]) -> str:
    """What a person can do about a missing group: nothing if the launcher of this one starts all of them."""
    if "ALL_GROUPS_HERE" in environment:
        return ""
    lighthouse = environment.get("TORCHFT_LIGHTHOUSE", "")
    return f"start a missing one with: TORCHFT_LIGHTHOUSE={lighthouse} REPLICA_ID=<its number> ./run_train.sh"


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
