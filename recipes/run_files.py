"""The files that a run leaves below ``job.dump_folder``: their names, and how they stay one consistent history.

config.toml, summary.json, replica_<id>/{metrics,rounds,ledger,validation,superseded}.jsonl, replica_<id>/summary.json,
replica_<id>/tb/, replica_<id>/log.txt, checkpoint/round-<n>/replica_<id>/
"""

import fcntl
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

HISTORY = ("metrics.jsonl", "validation.jsonl", "rounds.jsonl", "ledger.jsonl")


class FolderError(ValueError):
    """A folder that this run cannot write to, or that another run is using."""


def replica_folder(dump_folder: str | Path, replica_id: int) -> Path:
    """Where one replica group keeps its files."""
    return Path(dump_folder) / f"replica_{replica_id}"


def make_folder(folder: Path) -> None:
    """Create a folder that this process can write to. Raises FolderError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".writable.{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise FolderError(
            f"{folder}: cannot be written to ({error.strerror}); set job.dump_folder to a folder that can"
        ) from error


def lock_folder(folder: Path, name: str = ".lock", *, shared: bool = False) -> IO[str]:
    """Take a folder for this process, or with ``shared`` for all that ask so; it is free again when they have ended.

    Keep the returned file open. Raises FolderError, with the other process's id, if the folder is in use.
    """
    make_folder(folder)
    file = (folder / name).open("a+")
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError:
        owners = _living(file)
        file.close()
        raise FolderError(
            f"{folder}: in use by a run with process id {' and '.join(owners) or 'unknown'}; "
            "wait for it, stop it, or set another job.dump_folder"
        ) from None
    owners = [*_living(file), str(os.getpid())] if shared else [str(os.getpid())]
    file.truncate(0)
    file.write("\n".join(owners))
    file.flush()
    return file


def _living(file: IO[str]) -> list[str]:
    """The process ids in a lock file whose processes are alive."""
    file.seek(0)
    return [line for line in file.read().split() if line.isdecimal() and _is_alive(int(line))]


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except OSError as error:
        return isinstance(error, PermissionError)
    return True


def write_atomically(file: Path, text: str) -> None:
    """Replace a file's content so that a reader, and a crash, sees the old or the new one. Raises FolderError."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        with temporary.open("w") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
        temporary.replace(file)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise FolderError(f"{file}: could not be written ({error.strerror}); check the disk") from error


class ReplicaFiles:
    """The JSONL files of one replica group. One process writes them: rank 0 of the group."""

    def __init__(self, dump_folder: str | Path, replica_id: int) -> None:
        self.folder = replica_folder(dump_folder, replica_id)
        make_folder(self.folder)

    def append(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append rows to a file, after what is whole in it: a last line that a crash cut short is dropped."""
        text = "".join(json.dumps(row) + "\n" for row in rows)
        if not text:
            return
        with (self.folder / name).open("ab+") as file:
            if file.tell() > 0:
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    file.seek(0)
                    file.truncate(file.read().rfind(b"\n") + 1)
            file.write(text.encode())

    def read(self, name: str) -> list[dict[str, Any]]:
        """All rows of a file; none if there is no such file. A last line that a crash cut short is left out.

        Raises FolderError if another line is no row.
        """
        file = self.folder / name
        if not file.exists():
            return []
        *lines, _ = file.read_bytes().split(b"\n")
        rows = []
        for number, line in enumerate(lines, 1):
            try:
                rows.append(json.loads(line))
            except ValueError:
                raise FolderError(
                    f"{file}:{number}: not a row of JSON; repair or remove the line, or set another job.dump_folder"
                ) from None
        return rows

    def go_back_to(self, round_number: int, step: int) -> None:
        """Move the rows that are later than this round (metrics: than this step) to ``superseded.jsonl``."""
        for name in HISTORY:
            rows = self.read(name)
            key, last = ("step", step) if name in ("metrics.jsonl", "validation.jsonl") else ("round", round_number)
            later = [row for row in rows if row[key] > last]
            self.append("superseded.jsonl", ({"file": name, **row} for row in later))
            if later:
                kept = (row for row in rows if row[key] <= last)
                write_atomically(self.folder / name, "".join(json.dumps(row) + "\n" for row in kept))

    def history(self) -> list[dict[str, Any]]:
        """The committed rounds in the form that a donor tells to a joiner: each with its ledger rows."""
        ledger: dict[int, list[dict[str, Any]]] = {}
        for row in self.read("ledger.jsonl"):
            ledger.setdefault(row["round"], []).append(row)
        keys = ("round", "step", "participants", "digest", "tokens", "alive", "registered")
        return [
            {key: row[key] for key in keys} | {"ledger": ledger.get(row["round"], [])}
            for row in self.read("rounds.jsonl")
            if row["committed"]
        ]
