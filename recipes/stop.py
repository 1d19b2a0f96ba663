"""How a rank ends early: told to stop, or left alone by its parent."""

import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType

EXIT_BAD_INPUT = 2  # a restart would fail in the same way
EXIT_STOPPED = 75  # told to stop; the same command goes on from the last checkpoint

_PR_SET_PDEATHSIG = 1


class Stopped(BaseException):
    """SIGTERM or SIGINT arrived. Not an Exception: nothing on the way out may mistake it for a failure."""


def die_with_parent(expected_parent: int | None = None) -> None:
    """Have the kernel kill this process when its parent dies, also by kill -9. Linux only; elsewhere no effect.

    The parent may have died before the call: it must be ``expected_parent`` or, if that is not given and a launcher
    started this process (LAUNCHER_PID), another process of that launcher.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if expected_parent is None:
        orphaned = "LAUNCHER_PID" in os.environ and not _parent_has("LAUNCHER_PID", os.environ["LAUNCHER_PID"])
    else:
        orphaned = os.getppid() != expected_parent
    if orphaned:
        os._exit(EXIT_STOPPED)


def _parent_has(name: str, value: str) -> bool:
    try:
        environment = Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return f"{name}={value}".encode() in environment


def stop_on_signals(grace_seconds: float) -> None:
    """Raise Stopped in the main thread on SIGTERM or SIGINT, and end the process when the grace is over.

    The deadline runs in a thread that the C signal handler wakes through a pipe: it holds even while the main thread
    sits in a collective and cannot run Python.
    """
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    asked = {signal.SIGTERM, signal.SIGINT}

    def watch() -> None:
        while os.read(read_end, 1)[0] not in asked:
            pass
        # A little early, so that whoever counts the grace from outside finds the process gone.
        time.sleep(0.8 * grace_seconds)
        os._exit(EXIT_STOPPED)

    threading.Thread(target=watch, name="isoloco_stop", daemon=True).start()

    def raise_stopped(number: int, frame: FrameType | None) -> None:
        for each in asked:
            signal.signal(each, signal.SIG_IGN)
        raise Stopped(signal.Signals(number).name)

    for each in asked:
        signal.signal(each, raise_stopped)
