"""Kill every process of one replica group, as a power cut would: `python -m tools.kill_group DUMP_FOLDER GROUP`.

The launcher that started the group then starts it anew. A group's processes carry its number (REPLICA_ID) and its run's
folder (RUN_FOLDER) in their environment; nothing is found by name.
"""

import argparse
import os
import signal
import sys
from pathlib import Path


def processes_of_group(folder: Path, group: int) -> list[int]:
    """Ids of the living processes of group ``group`` of the run in ``folder``."""
    wanted = {f"REPLICA_ID={group}".encode(), f"RUN_FOLDER={folder.resolve()}".encode()}
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            environment = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue  # it ended, or belongs to somebody else
        if wanted <= set(environment):
            found.append(int(entry.name))
    return sorted(found)


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill every process of one replica group with SIGKILL.")
    parser.add_argument("folder", type=Path, help="the run's job.dump_folder")
    parser.add_argument("group", type=int, help="number of the group")
    arguments = parser.parse_args()
    processes = processes_of_group(arguments.folder, arguments.group)
    if not processes:
        print(f"error: no process of group {arguments.group} of a run in {arguments.folder} is alive", file=sys.stderr)
        return 2
    for process in processes:
        os.kill(process, signal.SIGKILL)
    print(f"killed group {arguments.group}: processes {', '.join(map(str, processes))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
