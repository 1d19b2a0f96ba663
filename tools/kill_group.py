"""Kill every process of one replica group, as a power cut would: `python -m tools.kill_group DUMP_FOLDER GROUP`.

The launcher that started the group then starts it anew. A group's processes carry its number (REPLICA_ID) and its run's
folder (RUN_FOLDER) in their environment; nothing is found by name.
"""

import argparse
import sys
from pathlib import Path

from recipes.run_processes import kill_processes_with, processes_with


def marks_of_group(folder: Path, group: int) -> dict[str, str]:
    """What the environment of every process of group ``group`` of the run in ``folder`` holds."""
    return {"REPLICA_ID": str(group), "RUN_FOLDER": str(folder.resolve())}


def processes_of_group(folder: Path, group: int) -> list[int]:
    """Ids of the living processes of group ``group`` of the run in ``folder``."""
    return processes_with(marks_of_group(folder, group))


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill every process of one replica group with SIGKILL.")
    parser.add_argument("folder", type=Path, help="the run's job.dump_folder")
    parser.add_argument("group", type=int, help="number of the group")
    arguments = parser.parse_args()
    try:
        killed = kill_processes_with(marks_of_group(arguments.folder, arguments.group))
    except PermissionError:
        print(f"error: group {arguments.group} of {arguments.folder} belongs to another user", file=sys.stderr)
        return 2
    if not killed:
        print(f"error: no process of group {arguments.group} of a run in {arguments.folder} is alive", file=sys.stderr)
        return 2
    print(f"killed group {arguments.group}: processes {', '.join(map(str, killed))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
