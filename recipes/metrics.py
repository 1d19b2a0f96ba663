"""What a replica group records: a row per log step and per round, the same in TensorBoard, and lines for a person."""

import logging
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils.tensorboard import SummaryWriter

from isoloco.outer_round import RoundReport
from recipes.config import Recipe
from recipes.run_files import ReplicaFiles

logger = logging.getLogger("isoloco")

# Dense bf16 matrix throughput in FLOP/s, from the makers' data sheets.
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12, "B200": 2250e12}


def log_to_stdout(replica_id: int, rank: int, log_rank: str = "") -> None:
    """Set up the "isoloco" logger: the ranks in ``log_rank`` ("0,1"; default 0) tell all, others only what is wrong."""
    who = f"group {replica_id}" + f" rank {rank}" * (rank > 0)
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter(f"%(asctime)s {who} %(levelname)s %(message)s", "%H:%M:%S"))
    # Gathering a matrix that is sharded over two mesh axes is not a mistake here, and said once per rank.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    logger.handlers = [handler]
    logger.propagate = False
    logger.setLevel(logging.INFO if str(rank) in (log_rank or "0").split(",") else logging.ERROR)


def peak_flops(device: torch.device) -> float | None:
    """FLOP/s of the device at its best, or None where it is not known: then no utilisation is reported."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((flops for part, flops in PEAK_FLOPS.items() if part in name), None)


class Metrics:
    """Writes the records of one replica group. Made and called on its rank 0 only.

    ``num_flops_per_token``: of the model, forward and backward. ``tokens_per_step``: of the whole group.
    """

    def __init__(
        self,
        recipe: Recipe,
        files: ReplicaFiles,
        *,
        step: int,
        tokens_per_step: int,
        num_flops_per_token: float,
        num_ranks: int,
        device: torch.device,
    ) -> None:
        self._recipe = recipe
        self._files = files
        self._replica_id = recipe.fault_tolerance.replica_id
        self._num_steps = recipe.training.steps
        self._tokens_per_step = tokens_per_step
        self._flops_per_step = num_flops_per_token * tokens_per_step
        self._peak = peak_flops(device)
        self._num_ranks = num_ranks
        self._device = device
        self._num_timed = 0  # inner steps since the last row, and the seconds that they took
        self._seconds = 0.0
        self._since = 0.0
        self._phase_started = 0.0
        self._phase_seconds = 0.0
        self.productive_seconds = 0.0  # spent in inner phases that a committed round counted
        self.started = time.monotonic()
        self._training_since = 0.0  # when the first phase began
        self._first_step = step
        self.faults: dict[str, int] = {"heals": 0, "retries": 0, "exclusions": 0, "solo_rounds": 0}
        self._num_solo = 0
        self._writer = None
        if recipe.metrics.enable_tensorboard:
            self._writer = SummaryWriter(str(files.folder / recipe.metrics.save_tb_folder), purge_step=step + 1)
        self._wandb = _start_wandb(recipe, files.folder) if recipe.metrics.enable_wandb else None

    def purge_after(self, step: int) -> None:
        """The run goes on from ``step``: later points of the curves are no part of it."""
        if self._writer is not None:
            self._writer.close()
            folder = str(self._files.folder / self._recipe.metrics.save_tb_folder)
            self._writer = SummaryWriter(folder, purge_step=step + 1)
        self._first_step = step

    def is_due(self, step: int) -> bool:
        """Whether inner step ``step`` (from 1) gets a row."""
        return step % self._recipe.metrics.log_freq == 0 or step in (1, self._num_steps)

    def begin_phase(self) -> None:
        """The inner steps of a phase begin."""
        self._phase_started = self._since = time.monotonic()
        self._training_since = self._training_since or self._phase_started

    def inner_step(self, step: int, round_number: int, *, lr: float, values: Mapping[str, Any]) -> None:
        """Count an inner step (from 1), and record it if one is due. ``values``: loss and grad_norm, read only then."""
        loss = grad_norm = 0.0
        if self.is_due(step):
            loss, grad_norm = float(values["loss"]), float(values["grad_norm"])  # waits for an accelerator
        now = time.monotonic()
        self._num_timed += 1
        self._seconds += now - self._since
        self._since = now
        self._phase_seconds = now - self._phase_started
        if not self.is_due(step):
            return
        seconds_per_step = self._seconds / self._num_timed
        self._num_timed, self._seconds = 0, 0.0
        row: dict[str, Any] = {
            "step": step,
            "round": round_number,
            "loss": loss,
            "tokens": step * self._tokens_per_step,
            "tokens_per_second": self._tokens_per_step / seconds_per_step,
            "lr": lr,
            "grad_norm": grad_norm,
            "seconds_per_step": seconds_per_step,
            "time": time.time(),
        }
        if self._peak is not None:
            row["mfu"] = self._flops_per_step / seconds_per_step / (self._peak * self._num_ranks)
        if self._device.type == "cuda":
            row["memory_gib"] = torch.cuda.max_memory_allocated(self._device) / 2**30
        self._files.append("metrics.jsonl", [row])
        self._plot(step, {f"inner/{key}": row[key] for key in row if key not in ("step", "round", "time")})
        logger.info(
            "%s step %*d/%d  loss %.4f  grad norm %.3f  lr %.2e  %s tokens/s%s  %s left",
            _bar(step / self._num_steps), len(str(self._num_steps)), step, self._num_steps, loss, grad_norm, lr,
            f"{row['tokens_per_second']:,.0f}", f"  MFU {row['mfu']:.1%}" if "mfu" in row else "",
            self._time_left(step),
        )  # fmt: skip

    def outer_round(self, report: RoundReport) -> None:
        """Record a meeting: a row if it committed (or healed over) a round, and a line in any case."""
        self.faults["retries"] += report.retries
        self.faults["heals"] += report.healed_from is not None
        self.faults["exclusions"] += len(report.reset_inner)
        if report.missed:
            first, own = report.missed[0]["round"], self._files.read("rounds.jsonl")
            if any(row["round"] >= first for row in own):  # a history that the others do not share
                self._files.go_back_to(first - 1, max((row["step"] for row in own if row["round"] < first), default=0))
            self._files.append("rounds.jsonl", [_missed_row(record, report) for record in report.missed])
            self._files.append("ledger.jsonl", [row for record in report.missed for row in record["ledger"]])
        if report.healed_from is not None:
            self.purge_after(report.step)
            logger.info("healed by group %d; goes on from round %d", report.healed_from, report.round)
        if not report.committed:
            who = f"{report.alive} of {report.registered} groups"
            logger.info("round %d: %s agree on the parameters, digest %s", report.round, who, report.digest)
            return
        self.productive_seconds += self._phase_seconds if report.weights[self._replica_id] > 0 else 0.0
        self._phase_seconds = 0.0
        row = {
            "round": report.round,
            "step": report.step,
            "committed": report.committed,
            "registered": report.registered,
            "alive": report.alive,
            "participants": report.participants,
            "weight": report.weights[self._replica_id],
            "weights": {str(replica): weight for replica, weight in report.weights.items()},
            "digest": report.digest,
            "seconds": report.seconds,
            "bytes_sent": report.bytes_sent,
            "bytes_received": report.bytes_received,
            "retries": report.retries,
            "healed_from": report.healed_from,
            "loss": report.loss,
            "tokens": report.tokens,
            "pseudo_gradient_norm": report.pseudo_gradient_norm[self._replica_id],
            "cosine": report.cosine.get(self._replica_id),
            "stable_rank_before": report.stable_rank[0] if report.stable_rank else None,
            "stable_rank_after": report.stable_rank[1] if report.stable_rank else None,
            "time": time.time(),
        }
        self._files.append("rounds.jsonl", [row])
        self._files.append("ledger.jsonl", report.ledger)
        curves: dict[str, Any] = {
            "loss": report.loss,
            "tokens": report.tokens,
            "participants": len(report.participants),
        }
        curves |= {"alive": report.alive, "bytes_sent": report.bytes_sent, "retries": report.retries}
        curves |= {f"seconds_{key}": value for key, value in report.seconds.items()}
        curves |= {
            key: row[key] for key in ("pseudo_gradient_norm", "cosine", "stable_rank_before", "stable_rank_after")
        }
        self._plot(report.step, {f"outer/{key}": value for key, value in curves.items() if value is not None})
        logger.info(
            "round %d committed at step %d by groups %s  loss %.4f  cosine %.2f  wait %.1f s, quorum %.2f s, "
            "exchange %.2f s, orthogonalize %.2f s, apply %.2f s  digest %s",
            report.round, report.step, report.participants, report.loss, row["cosine"] or 0.0,
            *(report.seconds[key] for key in ("wait", "quorum", "exchange", "orthogonalize", "apply")), report.digest,
        )  # fmt: skip
        self._watch_solo(report)

    def validation(self, step: int, round_number: int, loss: float) -> None:
        """Record a validation loss of the reference parameters."""
        row = {"step": step, "round": round_number, "validation_loss": loss, "time": time.time()}
        self._files.append("validation.jsonl", [row])
        self._plot(step, {"validation/loss": loss})
        logger.info("validation loss %.4f at step %d", loss, step)

    def close(self) -> None:
        """Flush what is buffered."""
        if self._writer is not None:
            self._writer.close()
        if self._wandb is not None:
            self._wandb.finish()

    def _watch_solo(self, report: RoundReport) -> None:
        alone = len(report.participants) == 1 and report.registered > 1
        self._num_solo = self._num_solo + 1 if alone else 0
        self.faults["solo_rounds"] += alone
        if self._num_solo == 2 or (self._num_solo > 0 and self._num_solo % 20 == 0):
            logger.warning(
                "%d rounds in a row with one participant of %d groups: this group trains alone",
                self._num_solo,
                report.registered,
            )

    def _time_left(self, step: int) -> str:
        per_step = (time.monotonic() - self._training_since) / max(1, step - self._first_step)
        left = int(per_step * (self._num_steps - step))
        return f"{left // 3600}h{left % 3600 // 60:02d}m" if left >= 3600 else f"{left // 60}m{left % 60:02d}s"

    def _plot(self, step: int, values: Mapping[str, float]) -> None:
        if self._writer is not None:
            for key, value in values.items():
                self._writer.add_scalar(key, value, step)
        if self._wandb is not None:
            self._wandb.log(dict(values), step=step)


def _missed_row(record: Mapping[str, Any], report: RoundReport) -> dict[str, Any]:
    """The row of a round that went on without this group and that it was healed over."""
    return {
        **{key: record[key] for key in ("round", "step", "registered", "alive", "participants", "digest", "tokens")},
        "committed": True,
        "weight": 0.0,
        "seconds": dict.fromkeys(report.seconds, 0.0),
        "bytes_sent": 0,
        "bytes_received": 0,
        "retries": 0,
        "healed_from": report.healed_from,
        "time": time.time(),
    }


def _bar(share: float, width: int = 20) -> str:
    full = round(width * share)
    return f"[{'#' * full}{'.' * (width - full)}]"


def _start_wandb(recipe: Recipe, folder: Path) -> Any:
    try:
        import wandb
    except ImportError:
        raise ValueError(
            "metrics.enable_wandb = true, but wandb is not installed: pip install wandb, or set it to false"
        ) from None
    return wandb.init(
        project="isoloco",
        dir=str(folder),
        name=f"replica_{recipe.fault_tolerance.replica_id}",
        id=f"{Path(recipe.job.dump_folder).resolve().name}-{recipe.fault_tolerance.replica_id}",
        resume="allow",
    )
