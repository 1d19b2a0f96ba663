"""A rank ends when it is told to, in time, and when its parent is gone."""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

from recipes.stop import EXIT_STOPPED

ROOT = Path(__file__).parents[3]
# A lock that is taken twice holds the thread inside C, where no signal handler of Python can run: as a collective does.
STUCK = """
import ctypes
mutex = ctypes.create_string_buffer(64)
libc = ctypes.CDLL(None)
libc.pthread_mutex_lock(mutex)
print("up", flush=True)
libc.pthread_mutex_lock(mutex)
"""
WAIT = "print('up', flush=True); time.sleep(60)"


@contextmanager
def start(program, **options):
    """A process that runs a program; gone when the block has ended."""
    command = [sys.executable, "-c", "import time, os, signal, sys; from recipes.stop import *\n" + program]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, **options) as process:
        try:
            yield process
            process.wait(timeout=30)
        finally:
            process.kill()


def state(process):
    """Of the process's main thread: R it runs, S it waits, Z it is dead; empty if there is no such process."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def is_alive(process):
    return state(process) not in ("", "Z", "X")


def gone_within(process, seconds):
    deadline = time.monotonic() + seconds
    while is_alive(process) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not is_alive(process)


class TestOnSignals:
    PROGRAM = f"""
stop_on_signals(30.0)
try:
    {WAIT}
except Exception:
    print("mistaken for a failure")
except Stopped as stopped:
    print("stopped by", stopped)
    os.kill(os.getpid(), signal.SIGTERM)  # asked again on the way out: still goes the ordinary way
    print("and tidied up")
    sys.exit(EXIT_STOPPED)
"""

    def test_the_main_thread_is_told(self):
        for number in (signal.SIGTERM, signal.SIGINT):
            with start(self.PROGRAM) as process:
                assert process.stdout.readline() == "up\n"
                process.send_signal(number)
                assert process.stdout.read() == f"stopped by {number.name}\nand tidied up\n"
            assert process.returncode == EXIT_STOPPED

    def test_a_thread_stuck_in_a_collective_ends_within_the_grace(self):
        with start("stop_on_signals(1.0)\n" + STUCK) as process:
            assert process.stdout.readline() == "up\n"
            while state(process.pid) != "S":  # on its way to the lock
                time.sleep(0.02)
            asked = time.monotonic()
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=30) == EXIT_STOPPED
            assert 0.7 < time.monotonic() - asked < 5.0

    def test_tidying_up_that_takes_too_long_is_cut_short(self):
        slow = f"stop_on_signals(0.5)\ntry:\n    {WAIT}\nfinally:\n    time.sleep(60)"
        with start(slow) as process:
            assert process.stdout.readline() == "up\n"
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=30) == EXIT_STOPPED

    def test_other_signals_start_no_countdown(self):
        program = """
heard = []
signal.signal(signal.SIGUSR1, lambda *_: heard.append(1))
stop_on_signals(0.2)
print("up", flush=True)
while not heard:
    time.sleep(0.01)
time.sleep(0.6)
print("alive")
"""
        with start(program) as process:
            assert process.stdout.readline() == "up\n"
            process.send_signal(signal.SIGUSR1)
            assert process.stdout.read() == "alive\n"


class TestWithParent:
    """``family`` starts a child that runs a program; the parent prints the child's id, then waits for it."""

    @staticmethod
    def family(program, **options):
        child = [sys.executable, "-c", "import time; from recipes.stop import *\n" + program]
        parent = f"import subprocess\nchild = subprocess.Popen({child!r})\nprint(child.pid, flush=True)\nchild.wait()"
        return start(parent, **options)

    def test_a_killed_parent_takes_its_child_along(self):
        with self.family(f"die_with_parent(); {WAIT}") as parent:
            lines = {parent.stdout.readline(), parent.stdout.readline()}
            (child,) = (int(line) for line in lines - {"up\n"})
            assert is_alive(child)
            parent.kill()
            assert gone_within(child, seconds=5)

    def test_a_child_whose_parent_is_already_gone_ends_at_once(self):
        with start("die_with_parent(expected_parent=1 << 22)\nprint('still here')") as process:
            assert process.stdout.read() == ""
        assert process.returncode == EXIT_STOPPED

    def test_the_right_parent_is_no_reason_to_end(self):
        with start(f"die_with_parent(expected_parent={os.getpid()})\nprint('still here')") as process:
            assert process.stdout.read() == "still here\n"

    def test_the_parent_of_a_launchers_process_must_be_of_the_same_launcher(self):
        program, marked = "die_with_parent(); print('still here')", {**os.environ, "LAUNCHER_PID": "123"}
        with start(program, env=marked) as orphan:
            assert orphan.stdout.read() == ""
        with self.family(program, env=marked) as parent:
            assert "still here" in parent.stdout.read()
