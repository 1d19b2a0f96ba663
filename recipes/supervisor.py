"""Keeps the processes of a run alive: starts them, shows what they say, restarts what fails, ends what must end.

A replica group is one child: a torchrun job that is started anew as a whole, after a pause that grows; the others do
not wait for it. One thread, one loop.
"""

import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import IO, Literal

from recipes.run_processes import kill_processes_with
from recipes.stop import EXIT_BAD_INPUT, EXIT_STOPPED, die_with_parent

LONGEST_PAUSE_SECONDS = 30.0
SECONDS_TO_EXIT = 2.0  # for a process that has nothing to save
# What a rank prints, see recipes/metrics.py; anything else is the noise of libraries.
_LINE = re.compile(r"^(?P<time>\d\d:\d\d:\d\d) group \d+( rank (?P<rank>\d+))? (?P<level>[A-Z]+) (?P<text>.*)$")
_COMMITTED = re.compile(r"^round (\d+) committed")
_AT_ROUND = re.compile(r"^(?:restored round|healed by group \d+; goes on from round) (\d+)")


@dataclass
class Child:
    """A process that the supervisor keeps alive, and what it said.

    ``environment``: variables beside the supervisor's own. ``log``: everything that it prints is appended to this file.
    """

    name: str
    command: list[str]
    environment: dict[str, str]
    log: Path
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    log_file: IO[bytes] | None = field(default=None, repr=False)
    unread: bytes = b""
    due: float | None = 0.0  # when to start it; None: it is running, or done
    kill_at: float | None = None  # when to end it the hard way
    failures: int = 0  # since its last committed round
    restarts: int = 0
    round: int = 0  # the last one that it said it holds
    has_committed: bool = False  # a round, since it was first started
    complaint: str = ""  # the first thing that it said was wrong
    is_fatal: bool = False  # and a restart would not help
    completed: bool = False

    @property
    def in_play(self) -> bool:
        """Whether it runs or will run again."""
        return self.process is not None or self.due is not None


class Supervisor:
    """Runs replica groups, and their lighthouse if there is one, until the run is complete, refused or stopped.

    Args:
        groups: group number -> its job.
        lighthouse: where the groups meet, if it is ours to keep alive.
        max_restarts: of one child without a committed round in between.
        min_groups: how many groups there must be left for a run to go on.
        grace_seconds: in which everything ends that is told to stop.
        shown_ranks: the ranks whose lines are shown, of one group at a time; if empty, all that speak. Warnings are
            shown of all groups.
        show_everything: show also what the libraries print.
    """

    def __init__(
        self,
        groups: Mapping[int, Child],
        lighthouse: Child | None = None,
        *,
        max_restarts: int = 10,
        min_groups: int = 1,
        grace_seconds: float = 30.0,
        shown_ranks: Collection[int] = (),
        show_everything: bool = False,
    ) -> None:
        self.groups = dict(groups)
        self.lighthouse = lighthouse
        self.status: Literal["completed", "stopped", "failed"] = "failed"
        self.refused = False  # something is wrong that a restart would not mend
        self._stopping = False
        self._signals: list[int] = []
        self._max_restarts = max_restarts
        self._min_groups = min_groups
        self._grace_seconds = grace_seconds
        self._shown_ranks = shown_ranks
        self._show_everything = show_everything
        self._shown: Child | None = None
        self._selector = selectors.DefaultSelector()
        self._mark = {"LAUNCHER_PID": str(os.getpid())}  # what all processes that come of this supervisor carry

    def run(self) -> int:
        """Run to the end; returns the exit status of the program."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as it is for SIGHUP under nohup
                signal.signal(number, self._on_signal)
        try:
            while any(child.in_play for child in self.groups.values()):
                self._obey_signals()
                self._start_what_is_due()
                self._listen(seconds=0.2)
                for child in self._children():
                    if child.process is None:
                        continue
                    if child.process.poll() is not None:
                        self._ended(child)
                    elif child.kill_at is not None and time.monotonic() > child.kill_at:
                        child.process.kill()
        finally:
            self._kill_all()
        if all(child.completed for child in self.groups.values()):
            self.status = "completed"
        if self.status == "completed":
            return 0
        if self.status == "stopped":
            return EXIT_STOPPED
        return EXIT_BAD_INPUT if self.refused else 1

    def _children(self) -> list[Child]:
        return [*([self.lighthouse] if self.lighthouse else []), *self.groups.values()]

    # ---- starting ----

    def _start_what_is_due(self) -> None:
        for child in self._children():
            if child.due is None or child.due > time.monotonic():
                continue
            child.due = child.kill_at = None
            child.complaint, child.is_fatal = "", False
            child.log.parent.mkdir(parents=True, exist_ok=True)
            child.log_file = child.log.open("ab")
            child.process = subprocess.Popen(
                child.command,
                env=os.environ | child.environment | self._mark,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl+C reaches the supervisor alone, which then ends its children in order
                preexec_fn=partial(die_with_parent, os.getpid()),
            )
            assert child.process.stdout is not None
            os.set_blocking(child.process.stdout.fileno(), False)
            self._selector.register(child.process.stdout, selectors.EVENT_READ, child)

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
        """Take note of a line, and show it if it is for a person."""
        if (match := _LINE.match(line)) is None:
            if self._show_everything:
                say(line)
            return
        rank, level, text = int(match["rank"] or 0), match["level"], match["text"]
        if committed := _COMMITTED.match(text):
            child.has_committed = True
            child.failures = 0
            child.complaint = ""
            if self.lighthouse is not None:
                self.lighthouse.failures = 0
        if at_round := committed or _AT_ROUND.match(text):
            child.round = int(at_round[1])
        if text.startswith("starting over"):
            # Done, and for the first start only: a restarted group belongs to the run that has begun.
            child.command = [argument for argument in child.command if argument != "--fresh"]
        if level in ("ERROR", "CRITICAL"):
            # The first complaint is the cause, later ones are often other ranks' about it. It is told at the end.
            if not child.complaint or (level == "CRITICAL" and not child.is_fatal):
                child.complaint = text
            child.is_fatal |= level == "CRITICAL"
            return
        if self._shown is None:
            self._shown = child
        if level == "WARNING":
            say(line)
        elif child is self._shown and (not self._shown_ranks or rank in self._shown_ranks):
            say(f"{match['time']} {f'rank {rank} ' * (rank > 0)}{text}")

    # ---- what ends ----

    def _ended(self, child: Child) -> None:
        assert child.process is not None
        self._read_rest(child)
        code = child.process.returncode
        child.process = None
        # What the job left behind, if anything: torchrun's ranks have sessions of their own.
        name = {"REPLICA_ID": child.environment["REPLICA_ID"]} if child is not self.lighthouse else {}
        if name:
            kill_processes_with(self._mark | name)
        if child is self._shown:
            self._shown = None  # whoever speaks next is shown from now on
        if child is not self.lighthouse and code == 0:
            child.completed = True
            self._one_is_complete(child)
        elif not self._stopping and self.status != "completed":
            self._failed(child, child.complaint or f"{_cause(code)}, see {child.log}")

    def _read_rest(self, child: Child) -> None:
        assert child.process is not None
        assert child.process.stdout is not None
        assert child.log_file is not None
        self._read(child)
        if child.process.stdout in self._selector.get_map():
            self._selector.unregister(child.process.stdout)
        child.process.stdout.close()
        child.log_file.close()
        child.unread = b""

    def _failed(self, child: Child, reason: str) -> None:
        """Start a child again, or give it up."""
        child.failures += 1
        if child.is_fatal:
            self._give_up(child, f"{child.name}: {reason}")
        elif child.failures > self._max_restarts:
            self._give_up(
                child,
                f"{child.name} failed {child.failures} times without a committed round in between "
                f"(fault_tolerance.max_restarts = {self._max_restarts}): {reason}",
            )
        else:
            pause = min(LONGEST_PAUSE_SECONDS, 2.0 ** (child.failures - 1))
            say(f"{child.name} ended ({reason}); starting it again in {pause:.0f} s")
            child.restarts += 1
            child.due = time.monotonic() + pause

    def _give_up(self, child: Child, error: str) -> None:
        """Leave a child down, and end all if the others cannot go on without it."""
        say(f"error: {error}", sys.stderr)
        others = [other for other in self.groups.values() if other.in_play]
        has_begun = any(other.has_committed for other in others)  # a start needs all groups
        if child is self.lighthouse or len(others) < self._min_groups or not has_begun:
            self.refused = child.is_fatal
            self._stop_all()

    def _one_is_complete(self, first: Child) -> None:
        """The run is complete. Groups that hold the last round finish their work; the others are ended."""
        self.status = "completed"
        for child in self.groups.values():
            if not child.in_play or (child.process is not None and child.round >= first.round):
                continue
            say(f"{child.name} had not come back when the run was completed; it is stopped")
            self._stop(child, SECONDS_TO_EXIT)

    # ---- ending it all ----

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)  # the loop sees to it: printing here could cut into a print under way

    def _obey_signals(self) -> None:
        while self._signals:
            name = signal.Signals(self._signals.pop(0)).name
            if self._stopping:  # asked twice: at once
                for child in self.groups.values():
                    child.kill_at = 0.0
                continue
            say(f"\n{name}: stopping all groups, in {self._grace_seconds:.0f} s at most")
            if self.status != "completed":
                self.status = "stopped"
            self._stop_all()

    def _stop_all(self) -> None:
        self._stopping = True
        has_work = any(child.round > 0 for child in self.groups.values())
        # A little early, so that nothing is left when the grace is over.
        seconds = 0.9 * self._grace_seconds if has_work or self.status == "stopped" else SECONDS_TO_EXIT
        for child in self.groups.values():
            self._stop(child, seconds)
        if self.lighthouse is not None:
            self.lighthouse.due = None

    def _stop(self, child: Child, seconds: float) -> None:
        """Ask a job to end, and see to it. torchrun passes SIGTERM on to its ranks."""
        child.due = None
        if child.process is not None and child.process.poll() is None:
            child.process.terminate()
            child.kill_at = time.monotonic() + seconds

    def _kill_all(self) -> None:
        for child in self._children():
            child.due = None
            if child.process is not None:
                child.process.kill()
                child.process.wait()
        kill_processes_with(self._mark)


def say(text: str, stream: IO[str] | None = None) -> None:
    """Print a line. A run does not end because nobody listens any more."""
    stream = stream or sys.stdout
    try:
        print(text, file=stream, flush=True)
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def _cause(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
