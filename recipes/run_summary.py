"""``summary.json``: what became of a run, for programs, and the same in a few lines for a person."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.config import Recipe
from recipes.run_files import ReplicaFiles, replica_folder, write_atomically

_OF_THE_RUN = (
    *("steps", "rounds", "tokens", "first_loss", "final_loss", "validation_loss_before", "validation_loss"),
    *("goodput", "digest", "run_id", "round_seconds"),
)


def summarize_files(files: ReplicaFiles) -> dict[str, Any]:
    """What the files of one replica group tell of it: steps, rounds, tokens, losses, digest, seconds per round."""
    rounds, validation = files.read("rounds.jsonl"), files.read("validation.jsonl")
    losses = [row["loss"] for row in rounds if "loss" in row]
    last = rounds[-1] if rounds else {"step": 0, "round": 0, "digest": None}
    return {
        "replica_id": int(files.folder.name.removeprefix("replica_")),
        "steps": last["step"],
        "rounds": last["round"],
        "tokens": sum(row["tokens"] for row in rounds),
        "first_loss": losses[0] if losses else None,
        "final_loss": losses[-1] if losses else None,
        "validation_loss_before": next((row["validation_loss"] for row in validation if row["step"] == 0), None),
        "validation_loss": validation[-1]["validation_loss"] if validation and validation[-1]["step"] > 0 else None,
        "digest": last["digest"],
        "round_seconds": mean_seconds(rounds),
    }


def mean_seconds(rounds: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds per round by part, over the rounds that this group went through itself."""
    own = [row["seconds"] for row in rounds if any(row["seconds"].values())]
    return {part: sum(seconds[part] for seconds in own) / len(own) for part in own[0]} if own else {}


@dataclass(frozen=True)
class SummaryFiles:
    """The summaries in a run's folder: the run's own, and one that each group writes when it ends.

    ``written``: group -> when its summary was last written before this launch (nanoseconds), for the groups that are
    ours. What has not changed since tells of an earlier launch.
    """

    folder: Path
    written: Mapping[int, int]

    @classmethod
    def before_launch(cls, folder: Path, groups: Sequence[int]) -> "SummaryFiles":
        return cls(folder, {group: _written(folder, group) for group in groups})

    def of_this_launch(self) -> dict[int, dict[str, Any]]:
        """Group -> its summary, where it wrote one since the launch."""
        return {
            group: json.loads(_file(self.folder, group).read_text())
            for group, before in self.written.items()
            if _written(self.folder, group) != before
        }

    def merge(self, status: str, completed: Mapping[int, bool], restarts: int) -> dict[str, Any]:
        """The run's summary. ``completed``: by group, as seen by who started it. Does not write it.

        A group that was ended before it could write its summary is described from its other files. Groups of the same
        run that somebody else started are included if they keep their files here.
        """
        replicas = self.of_this_launch()
        for group in self.written:
            if group not in replicas and replica_folder(self.folder, group).is_dir():
                ended = "completed" if completed.get(group) else "stopped" if status == "stopped" else "failed"
                replicas[group] = {"status": ended} | summarize_files(ReplicaFiles(self.folder, group))
        told = [each for each in replicas.values() if each["status"] == "completed"] or list(replicas.values())
        best: Mapping[str, Any] = max(told, key=lambda each: each["rounds"], default={})
        for file in self.folder.glob("replica_*/summary.json"):
            other = json.loads(file.read_text())
            if other["replica_id"] not in self.written and other["run_id"] == best.get("run_id"):
                replicas[other["replica_id"]] = other
        faults: dict[str, int] = {"restarts": restarts}
        for replica in replicas.values():
            for kind, count in replica.get("faults", {}).items():
                # A round with one participant is one such round, whoever tells of it.
                faults[kind] = max(faults.get(kind, 0), count) if kind == "solo_rounds" else faults.get(kind, 0) + count
        return {
            "status": status,
            **{key: best.get(key) for key in _OF_THE_RUN},
            "faults": faults,
            "not_back": [group for group, is_complete in completed.items() if not is_complete],
            "replicas": {str(group): replicas[group] for group in sorted(replicas)},
        }

    def write(self, summary: Mapping[str, Any]) -> None:
        write_atomically(self.folder / "summary.json", json.dumps(summary, indent=2) + "\n")

    def read(self) -> dict[str, Any]:
        """The run's summary as it was last written; empty if there is none that can be read."""
        try:
            return json.loads((self.folder / "summary.json").read_text())
        except (OSError, ValueError):
            return {}


def _file(folder: Path, group: int) -> Path:
    return replica_folder(folder, group) / "summary.json"


def _written(folder: Path, group: int) -> int:
    file = _file(folder, group)
    return file.stat().st_mtime_ns if file.exists() else 0


def describe_end(summary: Mapping[str, Any], recipe: Recipe, commands: Mapping[str, str]) -> str:
    """The summary for a person. ``commands``: what to do next -> the command for it."""
    folder = Path(recipe.job.dump_folder)
    lines = [f"run {summary['status']}: {summary['rounds'] or 0} rounds, {summary['tokens'] or 0:,} tokens"]
    lines += [
        f"  loss           {_number(summary['first_loss'])} -> {_number(summary['final_loss'])} (mean over a round)"
    ]
    before, after = summary["validation_loss_before"], summary["validation_loss"]
    if before is not None:
        share = f" ({after / before:.0%})" if after is not None else ""
        lines += [f"  validation     {_number(before)} -> {_number(after)}{share}"]
    parts = ", ".join(f"{part} {seconds:.2f}" for part, seconds in sorted((summary["round_seconds"] or {}).items()))
    lines += [f"  s per round    {parts or '-'}"]
    lines += [f"  goodput        {_number(summary['goodput'], 2)} (time in committed inner steps / all time)"]
    lines += [f"  faults         {', '.join(f'{count} {kind}' for kind, count in summary['faults'].items())}"]
    digests = [each["digest"] for each in summary["replicas"].values() if each["status"] == "completed"]
    if digests:
        equal = " (all groups equal)" if len(digests) > 1 and len(set(digests)) == 1 else ""
        lines += [f"  digest         {', '.join(sorted(set(digests)))}{equal}"]
    if recipe.metrics.enable_tensorboard:
        lines += [f"  TensorBoard    {folder}/replica_*/{recipe.metrics.save_tb_folder}"]
    if recipe.checkpoint.enable:
        lines += [f"  checkpoints    {folder / recipe.checkpoint.folder}"]
    return "\n".join(lines + command_lines(commands))


def command_lines(commands: Mapping[str, str]) -> list[str]:
    return [f"  {what + ':':<14} {command}" for what, command in commands.items()]


def _number(value: float | None, digits: int = 4) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
