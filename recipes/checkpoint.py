"""Checkpoints: the complete state at a round boundary, one folder per round and replica group.

    checkpoint/round-<n>/replica_<id>/checkpoint.json      the marker: written last, so what has it is whole
    checkpoint/round-<n>/replica_<id>/*.distcp, .metadata   torch.distributed.checkpoint (DCP)

Sites share no disk, so each group writes what all groups have (reference parameters, outer momentum, ledger) beside
what only it has (inner optimizer, random number generators). At a boundary the model equals the reference parameters.
"""

import json
import logging
import os
import shutil
from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from recipes.run_files import write_atomically

logger = logging.getLogger("isoloco")

MARKER = "checkpoint.json"
SET_ASIDE = "superseded.json"  # what the marker of a round is called whose history was given up
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class CheckpointError(ValueError):
    """A checkpoint that cannot be used, or could not be written."""


class Checkpoints:
    """The checkpoints of one replica group.

    Args:
        folder: of all groups' checkpoints (``<dump_folder>/checkpoint``).
        replica_id: of this group.
        shapes: parameter name -> shape of the model; a checkpoint of another model is refused.
        group: of this group's ranks, able to communicate CPU tensors; for saving only, which goes on in the background.
        keep_latest_k: how many to keep (0: all).
    """

    def __init__(
        self,
        folder: Path,
        replica_id: int,
        *,
        shapes: Mapping[str, list[int]],
        group: dist.ProcessGroup,
        keep_latest_k: int,
    ) -> None:
        self._folder = folder
        self._replica = f"replica_{replica_id}"
        self._shapes = dict(shapes)
        self._group = group
        self._keep_latest_k = keep_latest_k
        self._finished = Event()  # cleared while one is being written
        self._finished.set()
        self._failure: CheckpointError | None = None

    def restorable_rounds(self) -> list[int]:
        """Rounds with a whole checkpoint, oldest first; a broken newest one is skipped and its reason logged.

        One that was not written to the end never was a checkpoint. Raises CheckpointError if there are checkpoints but
        none is whole, or if they are of another model.
        """
        rounds, reasons = [], []
        for round_number, folder in self._rounds():
            if (folder / SET_ASIDE).exists():
                continue
            if not (folder / MARKER).exists():
                logger.warning("skipping the checkpoint %s: it was not written to the end", folder)
            elif reason := _why_broken(folder):
                reasons.append(f"{folder}: {reason}")
                logger.warning("skipping the checkpoint %s", reasons[-1])
            else:
                self._check_model(folder)
                rounds.append(round_number)
        if reasons and not rounds:
            raise CheckpointError(f"no whole checkpoint to go on from: {reasons[-1]}; to start over, say --fresh")
        return rounds

    def save(
        self, round_number: int, outer: Mapping[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        """Start writing the state of a round boundary; training may go on at once.

        ``outer``: the ``state_dict()`` of an OuterRound. Waits for the checkpoint before, if it is still being written.
        Raises CheckpointError if that one failed, and if the optimizer has no state for a parameter that it trains.
        """
        self.wait()
        folder = self._folder / f"round-{round_number}" / self._replica
        if dist.get_rank(self._group) == 0:
            shutil.rmtree(folder, ignore_errors=True)  # what an interrupted save of the same round left
            folder.mkdir(parents=True, exist_ok=True)
        dist.barrier(group=self._group)
        state = self._state(outer["tensors"], model, optimizer)
        marker = {"round": round_number, "outer": outer["record"], "shapes": self._shapes}
        self._finished.clear()
        writing: Future[Any] = dcp.async_save(  # type: ignore[assignment]
            state, checkpoint_id=folder, process_group=self._group
        )
        writing.add_done_callback(partial(self._finish, folder, marker))

    def _finish(self, folder: Path, marker: dict[str, Any], writing: "Future[Any]") -> None:
        """In the writing thread: make what it wrote a checkpoint, or keep its failure for the training thread."""
        try:
            writing.result()
            if dist.get_rank(self._group) == 0:
                files = {file.name: file.stat().st_size for file in folder.iterdir()}
                for name in files:
                    _flush_to_disk(folder / name)
                write_atomically(folder / MARKER, json.dumps(marker | {"files": files}))
                _flush_to_disk(folder)
                self._prune()
        except (Exception, CheckpointException) as error:
            self._failure = CheckpointError(f"{folder}: could not be written ({_reason(error)})")
        finally:
            self._finished.set()

    def raise_if_failed(self) -> None:
        """Raises CheckpointError if a checkpoint could not be written."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def wait(self) -> None:
        """Wait until the checkpoint under way is whole on disk. Raises CheckpointError if it failed."""
        self._finished.wait()
        self.raise_if_failed()

    def load(
        self, round_number: int, outer: Mapping[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> dict[str, Any]:
        """Load a round: the inner optimizer and the random number generators in place; returns the outer state.

        ``outer``: the current ``state_dict()`` of the OuterRound; its tensors are overwritten. Raises CheckpointError,
        before anything is changed, if the checkpoint lacks optimizer state of a parameter that is trained here.
        """
        folder = self._folder / f"round-{round_number}" / self._replica
        marker = json.loads((folder / MARKER).read_text())
        state = self._state(outer["tensors"], model, optimizer)
        try:
            _check_optimizer_state(folder, state["inner"], state["outer"])
            dcp.load(state, checkpoint_id=folder, process_group=self._group)
        except CheckpointError:
            raise
        except (Exception, CheckpointException) as error:
            reason = _reason(error)
            raise CheckpointError(f"{folder}: cannot be loaded ({reason}); to start over, say --fresh") from error
        set_optimizer_state_dict(model, optimizer, state["inner"], options=_FLAT)
        torch.set_rng_state(state["rng"][f"cpu.{dist.get_rank(self._group)}"])
        return {"tensors": state["outer"], "record": marker["outer"]}

    def _state(self, outer: Mapping[str, Tensor], model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        inner = get_optimizer_state_dict(model, optimizer, options=_FLAT)
        trained = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        for name, parameter in model.named_parameters():
            # torch leaves such parameters out in silence, and they would start over when the run goes on
            if parameter in trained and parameter.requires_grad and not optimizer.state.get(parameter):
                raise CheckpointError(f"the optimizer has no state for {name}, so a checkpoint would be incomplete")
        return {
            "outer": dict(outer),
            "inner": inner,
            "rng": {f"cpu.{dist.get_rank(self._group)}": torch.get_rng_state()},
        }

    def _check_model(self, folder: Path) -> None:
        saved = json.loads((folder / MARKER).read_text())["shapes"]
        if saved != self._shapes:
            odd = next(name for name in sorted({*saved, *self._shapes}) if saved.get(name) != self._shapes.get(name))
            raise CheckpointError(
                f"{folder}: the checkpoint is of another model ({odd} is {saved.get(odd, 'absent')} there and "
                f"{self._shapes.get(odd, 'absent')} here); set another job.dump_folder, or the recipe's model"
            )

    def _rounds(self) -> list[tuple[int, Path]]:
        """(round, this group's folder) of every checkpoint on disk, whole or not, oldest first."""
        found = [
            (int(folder.name.removeprefix("round-")), folder / self._replica)
            for folder in self._folder.glob("round-*")
            if folder.name.removeprefix("round-").isdigit() and (folder / self._replica).is_dir()
        ]
        return sorted(found)

    def _prune(self) -> None:
        whole = [folder for _, folder in self._rounds() if (folder / MARKER).exists()]
        if self._keep_latest_k == 0:
            return
        for folder in whole[: -self._keep_latest_k]:
            (folder / MARKER).unlink()  # first, so that a half-deleted one never looks whole
            shutil.rmtree(folder)
            if not any(folder.parent.iterdir()):
                folder.parent.rmdir()

    def go_back_to(self, round_number: int) -> None:
        """Set aside the checkpoints later than this round: their history is not the run's any more.

        Their files stay until the new history writes the same round.
        """
        for later, folder in self._rounds():
            marker = folder / MARKER
            if later > round_number and dist.get_rank(self._group) == 0 and marker.exists():
                marker.replace(folder / SET_ASIDE)

    def set_all_aside(self) -> None:
        """Set aside all of this group's checkpoints: what ``--fresh`` asks for."""
        self.go_back_to(-1)


def _reason(error: BaseException) -> str:
    """What went wrong, on one line. DCP wraps what failed on each rank, and its exception is not an Exception."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    first_line, *_ = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {first_line}"


def _check_optimizer_state(folder: Path, inner: Mapping[str, Any], outer: Mapping[str, Any]) -> None:
    """Raises CheckpointError if a checkpoint lacks one of the entries of a flat inner or of the outer state."""
    saved = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    if missing := [key for key in outer if f"outer.{key}" not in saved]:
        raise CheckpointError(
            f"{folder}: it has no outer state {missing[0]}: it was written with another outer.method or outer.momentum"
            "; set [outer] as it was or, to start over, say --fresh"
        )
    missing = [key for key in inner if f"inner.{key}" not in saved]
    if missing:
        more = f" and {len(missing) - 1} more" * (len(missing) > 1)
        raise CheckpointError(
            f"{folder}: it has no optimizer state {missing[0].removeprefix('state.')}{more}: it was written by another "
            "optimizer, or one that did not train this; set [optimizer] as it was or, to start over, say --fresh"
        )


def _why_broken(folder: Path) -> str | None:
    """Why a checkpoint cannot be used, or None if it is whole."""
    try:
        marker = json.loads((folder / MARKER).read_text())
    except (OSError, ValueError) as error:
        return f"{MARKER} cannot be read ({error})"
    for name, size in marker["files"].items():
        file = folder / name
        if not file.exists():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes instead of {size}: it was cut short or changed"
    return None


def _flush_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
