"""The processes of a run on this machine, found by what the launcher put into their environment, never by name."""

import contextlib
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path


def processes_with(variables: Mapping[str, str]) -> list[int]:
    """Ids of the living processes (this one left out) that were started with all these variables. Needs /proc."""
    wanted = {f"{name}={value}".encode() for name, value in variables.items()}
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            environment = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue  # it ended, or belongs to somebody else
        if wanted <= set(environment) and int(entry.name) != os.getpid():
            found.append(int(entry.name))
    return sorted(found)


def kill_processes_with(variables: Mapping[str, str], seconds: float = 5.0) -> list[int]:
    """SIGKILL them until none is left, for ``seconds`` at most. Returns the ids of all that were killed."""
    killed: set[int] = set()
    deadline = time.monotonic() + seconds
    while (found := processes_with(variables)) and time.monotonic() < deadline:
        for process in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        killed.update(found)
        time.sleep(0.02)
    return sorted(killed)
