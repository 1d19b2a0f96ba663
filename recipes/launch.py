"""Start a run and keep it alive: `./run_train.sh` ends here.

Alone on a machine: a torchft lighthouse and every replica group, each a torchrun job. With TORCHFT_LIGHTHOUSE and
REPLICA_ID: that one group (on this node of it), which joins the run at that lighthouse. A group whose process fails is
started anew as a whole, after a pause that grows; the others do not wait for it.

One thread, one loop: it reads what the groups print, notices what ends, and starts what is due. It imports no torch.
"""

import json
import os
import re
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import IO, Any

from recipes.command_line import USAGE, Command, free_port, parse_command, read_options
from recipes.config import Recipe, RecipeError, ranks_per_group
from recipes.recipe_file import help_text, recipe_to_toml
from recipes.run_files import lock_folder, replica_folder, write_atomically
from recipes.stop import EXIT_BAD_INPUT, EXIT_STOPPED, die_with_parent

LONGEST_PAUSE_SECONDS = 30.0
_LINE = re.compile(r"^\d\d:\d\d:\d\d group (?P<group>\d+) (?P<level>[A-Z]+) (?P<text>.*)$")
_COMMITTED = re.compile(r"^round (\d+) committed")


class LaunchError(ValueError):
    """The environment does not say what to start, or what it says cannot be started."""


@dataclass(frozen=True)
class Place:
    """Where and what to start, from the environment.

    ``only_group``: the one group to start, or None for all of them. ``lighthouse``: of the run to join, if any.
    ``num_ranks``: per group. ``num_nodes``, ``node_rank``, ``rendezvous``: of this group's torchrun.
    """

    only_group: int | None
    lighthouse: str | None
    num_ranks: int
    num_nodes: int
    node_rank: int
    rendezvous: str | None
    local_address: str | None
    train_module: str


def read_place(environment: Mapping[str, str], recipe: Recipe) -> Place:
    """Raises LaunchError or RecipeError if the variables do not go together."""

    def number(name: str, default: int) -> int:
        text = environment.get(name, "")
        if text and not text.isdecimal():
            raise LaunchError(f"{name}={text} in the environment: expected a whole number")
        return int(text) if text else default

    lighthouse = environment.get("TORCHFT_LIGHTHOUSE") or None
    only_group = number("ONLY_GROUP", number("REPLICA_ID", -1))
    if lighthouse and only_group < 0:
        raise LaunchError(
            "TORCHFT_LIGHTHOUSE is set but REPLICA_ID is not: say which group this is (REPLICA_ID=0, 1, ...), "
            "or unset TORCHFT_LIGHTHOUSE to start the whole run on this machine"
        )
    if only_group >= 0 and not lighthouse and recipe.fault_tolerance.num_replica_groups > 1:
        raise LaunchError(
            "REPLICA_ID is set but TORCHFT_LIGHTHOUSE is not: say where the groups meet (http://host:port), "
            "or unset REPLICA_ID to start the whole run on this machine"
        )
    num_nodes = number("NNODES", 1)
    rendezvous = environment.get("RDZV_ENDPOINT") or None
    if num_nodes > 1 and (rendezvous is None or only_group < 0):
        raise LaunchError(
            f"NNODES={num_nodes}: a group on several nodes needs RDZV_ENDPOINT=host:port of its first node, "
            "TORCHFT_LIGHTHOUSE and REPLICA_ID on each of them"
        )
    dp_shard, tp = ranks_per_group(recipe, number("NGPU", 0) or None)
    if dp_shard * tp % num_nodes:
        raise LaunchError(f"{dp_shard * tp} ranks cannot be spread evenly over NNODES={num_nodes}")
    return Place(
        only_group=only_group if only_group >= 0 else None,
        lighthouse=lighthouse,
        num_ranks=dp_shard * tp,
        num_nodes=num_nodes,
        node_rank=number("NODE_RANK", 0),
        rendezvous=rendezvous,
        local_address=environment.get("LOCAL_ADDR") or (None if lighthouse else "127.0.0.1"),
        train_module=environment.get("TRAIN_FILE") or "recipes.train",
    )


@dataclass
class Child:
    """A process that the launcher keeps alive, and what it said."""

    name: str
    command: list[str]
    environment: dict[str, str]
    log: Path
    process: subprocess.Popen[bytes] | None = None
    unread: bytes = b""
    due: float | None = 0.0  # when to start it; None: it is running, or done
    failures: int = 0  # since its last committed round
    restarts: int = 0
    round: int = 0  # the last one it said it committed
    complaint: str = ""  # the last thing it said was wrong
    is_fatal: bool = False  # and a restart would not help
    completed: bool = False
    log_file: IO[bytes] | None = field(default=None, repr=False)

    @property
    def running(self) -> bool:
        return self.process is not None


class Launcher:
    """Keeps a lighthouse (if this machine hosts it) and replica groups running until the run is complete."""

    def __init__(self, recipe: Recipe, place: Place, command: Command) -> None:
        self.recipe = recipe
        self.place = place
        self.folder = Path(recipe.job.dump_folder)
        self.stopping: str | None = None  # why everything is being ended
        self.status = "failed"
        self._deadline = 0.0
        self._selector = selectors.DefaultSelector()
        self._shown_by: int | None = None
        self._last_complaint = ""
        groups = (
            [place.only_group] if place.only_group is not None else range(recipe.fault_tolerance.num_replica_groups)
        )
        lighthouse = place.lighthouse
        self.lighthouse: Child | None = None
        if lighthouse is None and len(groups) > 1:
            port = recipe.fault_tolerance.lighthouse_port or free_port()
            _refuse_used_port(port, "fault_tolerance.lighthouse_port")
            lighthouse = f"http://127.0.0.1:{port}"
            self.lighthouse = Child("lighthouse", _lighthouse_command(recipe, port), {}, self.folder / "lighthouse.log")
        if place.rendezvous and place.num_nodes > 1 and place.node_rank == 0:
            _refuse_used_port(int(place.rendezvous.rpartition(":")[2]), "RDZV_ENDPOINT")
        gpus = _gpus()
        self.groups = {
            group: Child(
                f"group {group}",
                _group_command(place, group, self.folder / "config.toml", command),
                _group_environment(place, group, lighthouse, self.folder, _share(gpus, position, len(groups), place)),
                replica_folder(self.folder, group) / "log.txt",
            )
            for position, group in enumerate(groups)
        }
        self.device = "GPU" if gpus and len(gpus) >= len(groups) * place.num_ranks // place.num_nodes else "CPU"

    def run(self) -> int:
        """Run to the end; returns the exit status."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)
        try:
            while any(child.running or child.due is not None for child in self.groups.values()):
                self._start_what_is_due()
                self._listen(seconds=0.2)
                for child in self._children():
                    if child.process is not None and child.process.poll() is not None:
                        self._ended(child)
                if self.stopping and time.monotonic() > self._deadline:
                    self._kill_all()
        finally:
            self._kill_all()
        if all(child.completed for child in self.groups.values()) or self.status == "completed":
            self.status = "completed"
            return 0
        if self.status == "stopped":
            return EXIT_STOPPED
        return EXIT_BAD_INPUT if any(child.is_fatal for child in self.groups.values()) else 1

    def _children(self) -> list[Child]:
        return [*([self.lighthouse] if self.lighthouse else []), *self.groups.values()]

    # ---- starting ----

    def _start_what_is_due(self) -> None:
        for child in self._children():
            if child.due is None or child.due > time.monotonic() or self.stopping:
                continue
            child.due = None
            child.complaint, child.is_fatal = "", False
            child.log.parent.mkdir(parents=True, exist_ok=True)
            child.log_file = child.log.open("ab")
            child.process = subprocess.Popen(
                child.command,
                env=os.environ | child.environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl+C reaches the launcher alone, which then ends its children in order
                preexec_fn=partial(die_with_parent, os.getpid()),
            )
            assert child.process.stdout is not None
            os.set_blocking(child.process.stdout.fileno(), False)
            self._selector.register(child.process.stdout, selectors.EVENT_READ, child)
            # --fresh is for the first start only: a restarted group belongs to the run that has begun.
            child.command = [argument for argument in child.command if argument != "--fresh"]

    # ---- what they print ----

    def _listen(self, seconds: float) -> None:
        for key, _ in self._selector.select(seconds):
            self._read(key.data)

    def _read(self, child: Child) -> None:
        assert child.process is not None
        assert child.process.stdout is not None
        assert child.log_file is not None
        data = child.process.stdout.read()
        if data is None:
            return
        if not data:  # every process that could write has ended
            if child.process.stdout in self._selector.get_map():
                self._selector.unregister(child.process.stdout)
            return
        child.log_file.write(data)
        child.log_file.flush()
        *lines, child.unread = (child.unread + data).split(b"\n")
        for line in lines:
            self._hear(child, line.decode(errors="replace").rstrip())

    def _hear(self, child: Child, line: str) -> None:
        if (match := _LINE.match(line)) is None:
            return
        group, level, text = int(match["group"]), match["level"], match["text"]
        if committed := _COMMITTED.match(text):
            child.round = int(committed[1])
            child.failures = 0
        if level in ("ERROR", "CRITICAL"):
            child.complaint = text
            child.is_fatal |= level == "CRITICAL"
            return  # told once the group has ended
        if self._shown_by is None:
            self._shown_by = group
        if group == self._shown_by or level == "WARNING":
            print(line.replace(f" group {group} INFO", ""), flush=True)

    # ---- what ends ----

    def _ended(self, child: Child) -> None:
        assert child.process is not None
        assert child.log_file is not None
        self._read_rest(child)
        code, pid = child.process.returncode, child.process.pid
        _kill_session(pid)  # what the job left behind, if anything
        child.process = None
        child.log_file.close()
        if child is self.lighthouse:
            if not self.stopping:
                print(f"the lighthouse ended ({_cause(code)}); starting it again at the same address", flush=True)
                child.due = time.monotonic()
            return
        if code == 0 and not self.stopping:
            child.completed = True
            self._one_is_complete(child)
            return
        if self.stopping:
            return
        child.failures += 1
        reason = child.complaint or f"{_cause(code)}, see {child.log}"
        if child.is_fatal:
            if reason != self._last_complaint:
                print(f"error: {child.name}: {reason}", file=sys.stderr, flush=True)
            self._last_complaint = reason
            self._stop_all(f"{child.name} cannot run")
            return
        limit = self.recipe.fault_tolerance.max_restarts
        if child.failures > limit:
            print(
                f"error: {child.name} failed {child.failures} times without a committed round in between "
                f"(fault_tolerance.max_restarts = {limit}): {reason}",
                file=sys.stderr,
                flush=True,
            )
            return
        pause = min(LONGEST_PAUSE_SECONDS, 2.0 ** (child.failures - 1))
        print(f"{child.name} ended ({reason}); starting it again in {pause:.0f} s", flush=True)
        child.restarts += 1
        child.due = time.monotonic() + pause
        if self._shown_by is not None and child is self.groups.get(self._shown_by):
            self._shown_by = None  # whoever speaks next is shown from now on

    def _read_rest(self, child: Child) -> None:
        assert child.process is not None
        assert child.process.stdout is not None
        self._read(child)
        if child.process.stdout in self._selector.get_map():
            self._selector.unregister(child.process.stdout)
        child.process.stdout.close()
        child.unread = b""

    def _one_is_complete(self, first: Child) -> None:
        """The run is complete. Groups that committed the last round finish their work; the others are ended."""
        self.status = "completed"
        for child in self.groups.values():
            if child.completed or child.round >= first.round > 0:
                continue
            if child.running or child.due is not None:
                print(f"{child.name} had not come back when the run was completed; it is stopped", flush=True)
            child.due = None
            if child.process is not None:
                self._end(child.process, signal.SIGTERM)

    # ---- ending it all ----

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.stopping:
            self._deadline = 0.0  # asked twice: at once
            return
        if self.status != "completed":
            self.status = "stopped"
        print(f"\n{signal.Signals(number).name}: stopping all groups", flush=True)
        self._stop_all("stopped by a signal")

    def _stop_all(self, reason: str) -> None:
        self.stopping = reason
        # A little early, so that nothing is left when the grace is over.
        self._deadline = time.monotonic() + 0.9 * self.recipe.checkpoint.grace
        for child in self.groups.values():
            child.due = None
            if child.process is not None:
                self._end(child.process, signal.SIGTERM)

    def _kill_all(self) -> None:
        for child in self._children():
            child.due = None
            if child.process is not None:
                self._end(child.process, signal.SIGKILL)
                child.process.wait()

    def _end(self, process: subprocess.Popen[bytes], number: signal.Signals) -> None:
        """Signal a job's main process; torchrun passes SIGTERM on to its ranks, and they die with it."""
        if process.poll() is None:
            process.send_signal(number)


def _kill_session(leader: int) -> None:
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return  # nothing was left, as it should be


def _cause(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"


def _lighthouse_command(recipe: Recipe, port: int) -> list[str]:
    groups = recipe.fault_tolerance
    program = shutil.which("torchft_lighthouse", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if program is None:
        raise LaunchError("torchft_lighthouse is not installed beside this Python: pip install torchft")
    return [
        program,
        "--bind", f"[::]:{port}",
        "--min_replicas", "1",  # how many may start or commit is the round's decision, not the lighthouse's
        "--join_timeout_ms", str(int(groups.join_timeout_seconds * 1000)),
        "--heartbeat_timeout_ms", str(int(groups.heartbeat_timeout_seconds * 1000)),
        "--quorum_tick_ms", "100",
    ]  # fmt: skip


def _group_command(place: Place, group: int, config_file: Path, command: Command) -> list[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--max-restarts", "0"]
    torchrun += ["--nproc-per-node", str(place.num_ranks // place.num_nodes)]
    if place.num_nodes == 1:
        torchrun += ["--standalone"]
    else:
        torchrun += ["--nnodes", str(place.num_nodes), "--node-rank", str(place.node_rank)]
        torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", str(place.rendezvous)]
        torchrun += ["--rdzv-id", f"isoloco-{group}"]
    if place.local_address:
        torchrun += ["--local-addr", place.local_address]
    torchrun += ["-m", place.train_module, "--job.config_file", str(config_file)]
    return torchrun + ["--fresh"] * command.fresh + ["--debug"] * command.debug


def _group_environment(
    place: Place, group: int, lighthouse: str | None, folder: Path, gpus: Sequence[str]
) -> dict[str, str]:
    environment = {
        "REPLICA_ID": str(group),
        "RUN_FOLDER": str(folder.resolve()),
        "CUDA_VISIBLE_DEVICES": ",".join(gpus),
    }
    if lighthouse:
        environment["TORCHFT_LIGHTHOUSE"] = lighthouse
    if "OMP_NUM_THREADS" not in os.environ:
        environment["OMP_NUM_THREADS"] = "1"
    return environment


def _gpus() -> list[str]:
    """The GPUs that this machine offers, as CUDA_VISIBLE_DEVICES names them."""
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name for name in visible.split(",") if name]
    if (program := shutil.which("nvidia-smi")) is None:
        return []
    listing = subprocess.run([program, "-L"], capture_output=True, text=True, check=False)
    return [str(index) for index, _ in enumerate(re.findall(r"^GPU ", listing.stdout, re.MULTILINE))]


def _share(gpus: Sequence[str], position: int, num_groups: int, place: Place) -> Sequence[str]:
    """The GPUs of one group; none for any group unless there are enough for all."""
    num_ranks = place.num_ranks // place.num_nodes
    if len(gpus) < num_ranks * num_groups:
        return []
    return gpus[position * num_ranks : (position + 1) * num_ranks]


def _refuse_used_port(port: int, key: str) -> None:
    with socket.socket(socket.AF_INET6) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("::", port))
        except OSError as error:
            raise LaunchError(f"{key}: port {port} cannot be used ({error.strerror}); choose another one") from error


# ---- the summary ----


def merge_summaries(launcher: Launcher) -> dict[str, Any]:
    """``summary.json`` of the run, from those of the groups that this launcher started."""
    replicas = {}
    for group in launcher.groups:
        file = replica_folder(launcher.folder, group) / "summary.json"
        if file.exists():
            replicas[str(group)] = json.loads(file.read_text())
    told = [replica for replica in replicas.values() if replica["status"] == "completed"] or list(replicas.values())
    best: dict[str, Any] = max(told, key=lambda replica: replica["rounds"], default={})
    faults: dict[str, int] = {"restarts": sum(child.restarts for child in launcher.groups.values())}
    for replica in replicas.values():
        for kind, count in replica["faults"].items():
            faults[kind] = faults.get(kind, 0) + count
    keys = ("steps", "rounds", "tokens", "first_loss", "final_loss", "validation_loss_before", "validation_loss")
    return {
        "status": launcher.status,
        **{key: best.get(key) for key in (*keys, "goodput", "digest", "run_id", "round_seconds")},
        "faults": faults,
        "not_back": [group for group, child in launcher.groups.items() if not child.completed],
        "replicas": replicas,
    }


def describe_start(launcher: Launcher, recipe: Recipe) -> str:
    place = launcher.place
    dp_shard, tp = ranks_per_group(recipe, place.num_ranks)
    groups = ", ".join(str(group) for group in launcher.groups)
    method = f"{recipe.outer.method} outside, {recipe.optimizer.name} inside"
    return "\n".join(
        [
            f"group {groups} of {recipe.fault_tolerance.num_replica_groups}, each of {place.num_ranks} ranks "
            f"(FSDP {dp_shard} x TP {tp}) on {launcher.device}: model {recipe.model.flavor}, {method}",
            f"{recipe.training.steps} steps, a round every {recipe.outer.sync_steps}; files in {launcher.folder}/",
            *_commands(launcher),
        ]
    )


def _commands(launcher: Launcher) -> list[str]:
    python = os.path.relpath(sys.executable) if os.access(sys.executable, os.X_OK) else "python"
    group = list(launcher.groups)[-1]
    return [
        f"  watch:         {python} -m tensorboard.main --logdir {launcher.folder}",
        f"  kill a group:  {python} -m tools.kill_group {launcher.folder} {group}",
    ]


def describe_end(launcher: Launcher, summary: Mapping[str, Any], resume: str) -> str:
    """The summary for a person."""

    def number(value: float | None, digits: int = 4) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    lines = [f"run {summary['status']}: {summary['rounds'] or 0} rounds, {summary['tokens'] or 0:,} tokens"]
    lines += [
        f"  loss           {number(summary['first_loss'])} -> {number(summary['final_loss'])} (mean over a round)"
    ]
    if summary["validation_loss_before"] is not None:
        before, after = summary["validation_loss_before"], summary["validation_loss"]
        share = f" ({after / before:.0%})" if after is not None else ""
        lines += [f"  validation     {number(before)} -> {number(after)}{share}"]
    seconds, rounds = summary["round_seconds"] or {}, max(1, summary["rounds"] or 1)
    parts = ", ".join(f"{part} {seconds[part] / rounds:.2f}" for part in sorted(seconds))
    lines += [f"  s per round    {parts or '-'}"]
    lines += [f"  goodput        {number(summary['goodput'], 2)} (time in committed inner steps / all time)"]
    lines += [f"  faults         {', '.join(f'{count} {kind}' for kind, count in summary['faults'].items())}"]
    digests = {replica["digest"] for replica in summary["replicas"].values() if replica["status"] == "completed"}
    lines += [f"  digest         {', '.join(sorted(map(str, digests)))}" + " (all groups equal)" * (len(digests) == 1)]
    checkpoints = launcher.folder / launcher.recipe.checkpoint.folder
    lines += [f"  TensorBoard    {launcher.folder}/replica_*/{launcher.recipe.metrics.save_tb_folder}"]
    lines += [f"  checkpoints    {checkpoints}", f"  resume:        {resume}", *_commands(launcher)]
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    options = read_options(arguments)
    if options.help:
        print(f"usage: ./run_train.sh [OPTIONS] [--section.key VALUE ...]\n\n{USAGE}\n{help_text()}")
        return 0
    command, recipe = parse_command(arguments)
    place = read_place(os.environ, recipe)
    if command.validate:
        print(f"{command.config_file or 'the debug recipe'}: ok")
        return 0
    if recipe.job.print_config:
        print(recipe_to_toml(recipe))
    folder = Path(recipe.job.dump_folder)
    name = ".lock" if place.only_group is None else f".lock.{place.only_group}.{place.node_rank}"
    with lock_folder(folder, name):
        launcher = Launcher(recipe, place, command)
        write_atomically(folder / "config.toml", recipe_to_toml(recipe))
        print(describe_start(launcher, recipe), flush=True)
        status = launcher.run()
        summary = merge_summaries(launcher)
        write_atomically(folder / "summary.json", json.dumps(summary, indent=2) + "\n")
        if not any(child.is_fatal for child in launcher.groups.values()):
            print(describe_end(launcher, summary, " ".join(["./run_train.sh", *arguments])), flush=True)
    return status


def run() -> None:
    """The program: errors that a person can mend are one line."""
    try:
        status = main(sys.argv[1:])
    except ValueError as error:
        if "--debug" in sys.argv:
            raise
        problems = error.problems if isinstance(error, RecipeError) else [str(error)]
        print("\n".join(f"error: {problem}" for problem in problems), file=sys.stderr)
        status = EXIT_BAD_INPUT
    sys.exit(status)


if __name__ == "__main__":
    run()
