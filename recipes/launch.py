"""Start a run and keep it alive: `./run_train.sh` ends here.

Alone on a machine: a torchft lighthouse and every replica group, each a torchrun job. With TORCHFT_LIGHTHOUSE and
REPLICA_ID: that one group (on this node of it), which joins the run at that lighthouse.

This module says what to start; recipes/supervisor.py keeps it alive. Neither imports torch.

Exit status: 0 the run is complete, 2 bad input, 75 stopped by a signal (the same command goes on from the last
checkpoint), 1 it failed.
"""

import contextlib
import glob
import http.client
import importlib.util
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from recipes.check_recipe import unused_keys
from recipes.command_line import USAGE, Command, free_port, parse_command, read_options
from recipes.config import Recipe, RecipeError, min_replica_groups, ranks_per_group
from recipes.model_shape import FLAVORS
from recipes.recipe_file import config_diff, hashed_items, help_text, load_recipe, recipe_to_toml
from recipes.run_files import lock_folder, replica_folder, write_atomically
from recipes.run_summary import SummaryFiles, command_lines, describe_end
from recipes.stop import EXIT_BAD_INPUT, EXIT_STOPPED
from recipes.supervisor import Child, Supervisor, say
from recipes.tokenizer import check_vocabulary, load_tokenizer
from recipes.validate import describe

LIGHTHOUSE_WAIT_SECONDS = 20.0


class LaunchError(ValueError):
    """The environment does not say what to start, or what it says cannot be started."""


# ---- what the environment says ----


@dataclass(frozen=True)
class Place:
    """Where and what to start, from the environment.

    ``only_group``: the one group to start, or None for all of them. ``lighthouse``: of the run to join, if any.
    ``num_ranks``: per group. ``num_nodes``, ``node_rank``, ``rendezvous``: of this group's torchrun.
    ``local_address``: under which the ranks' machine can be reached; None for its host name. ``shown_ranks``: whose
    lines a person wants to see; none in particular if empty. ``train_module``: what a rank runs.
    """

    only_group: int | None
    lighthouse: str | None
    num_ranks: int
    num_nodes: int
    node_rank: int
    rendezvous: str | None
    local_address: str | None
    shown_ranks: tuple[int, ...]
    train_module: str

    @property
    def ranks_here(self) -> int:
        """Ranks of a group that run on this node."""
        return self.num_ranks // self.num_nodes


def read_place(environment: Mapping[str, str], recipe: Recipe) -> Place:
    """Raises LaunchError or RecipeError if the variables do not go together."""

    def number(name: str, default: int, least: int = 0) -> int:
        text = environment.get(name, "")
        if not text:
            return default
        if not re.fullmatch(r"[0-9]{1,6}", text) or int(text) < least:
            shown = name.replace("ONLY_GROUP", "REPLICA_ID")  # run_train.sh passes it on under another name
            raise LaunchError(f"{shown}={text} in the environment: must be a whole number, at least {least}")
        return int(text)

    lighthouse = environment.get("TORCHFT_LIGHTHOUSE") or None
    only_group = number("ONLY_GROUP", number("REPLICA_ID", -1))
    if lighthouse:
        _host_and_port(lighthouse)
        if only_group < 0:
            raise LaunchError(
                "TORCHFT_LIGHTHOUSE is set but REPLICA_ID is not: say which group this is (REPLICA_ID=0, 1, ...), "
                "or unset TORCHFT_LIGHTHOUSE to start the whole run on this machine"
            )
    elif only_group >= 0 and recipe.fault_tolerance.num_replica_groups > 1:
        raise LaunchError(
            "REPLICA_ID is set but TORCHFT_LIGHTHOUSE is not: say where the groups meet (http://host:port), "
            "or unset REPLICA_ID to start the whole run on this machine"
        )
    num_nodes, node_rank = number("NNODES", 1, least=1), number("NODE_RANK", 0)
    rendezvous = environment.get("RDZV_ENDPOINT") or None
    if num_nodes > 1 and (rendezvous is None or only_group < 0):
        raise LaunchError(
            f"NNODES={num_nodes}: a group on several nodes needs RDZV_ENDPOINT=host:port of its first node, "
            "TORCHFT_LIGHTHOUSE and REPLICA_ID on each of them"
        )
    if num_nodes > 1 and not re.fullmatch(r".+:[0-9]{1,5}", rendezvous or ""):
        raise LaunchError(f"RDZV_ENDPOINT={rendezvous}: expected host:port of the group's first node")
    if node_rank >= num_nodes:
        raise LaunchError(f"NODE_RANK={node_rank}: the nodes of NNODES={num_nodes} count from 0 to {num_nodes - 1}")
    dp_shard, tp = ranks_per_group(recipe, number("NGPU", 0, least=1) or None)
    if dp_shard * tp % num_nodes:
        raise LaunchError(f"{dp_shard * tp} ranks cannot be spread evenly over NNODES={num_nodes}")
    log_rank = environment.get("LOG_RANK", "")
    if not re.fullmatch(r"([0-9]{1,6}(,[0-9]{1,6})*)?", log_rank):
        raise LaunchError(f"LOG_RANK={log_rank} in the environment: expected ranks, such as 0 or 0,1")
    train_module = environment.get("TRAIN_FILE") or "recipes.train"
    if not _exists(train_module):
        raise LaunchError(f"TRAIN_FILE={train_module}: Python finds no such module; name it as in python -m")
    return Place(
        only_group=only_group if only_group >= 0 else None,
        lighthouse=lighthouse,
        num_ranks=dp_shard * tp,
        num_nodes=num_nodes,
        node_rank=node_rank,
        rendezvous=rendezvous,
        local_address=environment.get("LOCAL_ADDR") or (None if lighthouse or num_nodes > 1 else "127.0.0.1"),
        shown_ranks=tuple(int(rank) for rank in log_rank.split(",") if rank),
        train_module=train_module,
    )


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _host_and_port(lighthouse: str) -> tuple[str, int]:
    try:
        url = urlsplit(lighthouse)
        host, port = url.hostname, url.port
    except ValueError:
        host = port = None
    if host is None or port is None or url.scheme != "http":
        raise LaunchError(f"TORCHFT_LIGHTHOUSE={lighthouse}: expected an address of the form http://host:port")
    return host, port


# ---- what can be found out before anything starts ----


def check_files(recipe: Recipe) -> None:
    """Raises TokenizerError or LaunchError if a file that the recipe names is missing, or the vocabulary too large.

    Whether text can be trained on is seen when it is read.
    """
    check_vocabulary(load_tokenizer(recipe.model.tokenizer_path), FLAVORS[recipe.model.flavor].vocab_size)
    paths = {"training.dataset_path": recipe.training.dataset_path}
    if recipe.validation.enable:
        paths["validation.dataset_path"] = recipe.validation.dataset_path
    for key, path in paths.items():
        pattern = os.path.expanduser(path)
        if path and not os.path.exists(pattern) and not glob.glob(pattern, recursive=True):
            raise LaunchError(f"{path}: no such file or folder; set {key} to text that exists on this machine")


def check_lighthouse(address: str, seconds: float = LIGHTHOUSE_WAIT_SECONDS) -> None:
    """Return once a torchft lighthouse answers at ``http://host:port``; raises LaunchError after ``seconds``."""
    host, port = _host_and_port(address)
    started = time.monotonic()
    told = started
    while True:
        connection = http.client.HTTPConnection(host, port, timeout=5.0)
        try:
            connection.request("GET", "/")
            if b"torchft" in connection.getresponse().read(2000):
                return
            reason = "what answers there is something else"
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        finally:
            connection.close()
        if time.monotonic() - started > seconds:
            raise LaunchError(
                f"no lighthouse at {address}: {reason} (tried for {seconds:.0f} s); check that torchft_lighthouse "
                "runs there, the host and the port in TORCHFT_LIGHTHOUSE, and that no firewall is in between"
            )
        if time.monotonic() - told > 9:
            say(f"waiting for the lighthouse at {address}: {reason}")
            told = time.monotonic()
        time.sleep(0.5)


def check_port(port: int, what: str) -> None:
    """Raises LaunchError if something listens at a port that is to be ours."""
    with socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET) as probe:
        if probe.family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a connection that lingers does not count
        try:
            probe.bind(("", port))
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise LaunchError(f"{what}: port {port} cannot be used ({reason}); choose another one") from error


# ---- what to start ----


@dataclass(frozen=True)
class Plan:
    """The processes of a run on this machine. ``device``: GPU or CPU."""

    groups: dict[int, Child]
    lighthouse: Child | None
    device: str


def make_plan(recipe: Recipe, place: Place, command: Command) -> Plan:
    """Raises LaunchError if a port is taken, a program is missing or there are too few GPUs."""
    folder = Path(recipe.job.dump_folder)
    numbers = [place.only_group] if place.only_group is not None else range(recipe.fault_tolerance.num_replica_groups)
    gpus = find_gpus(os.environ)
    on_gpu = len(gpus) >= len(numbers) * place.ranks_here
    if recipe.fault_tolerance.process_group == "nccl" and not on_gpu:
        raise LaunchError(
            f'fault_tolerance.process_group = "nccl" needs a GPU for each of {len(numbers) * place.ranks_here} ranks, '
            f'and there are {len(gpus)} here: set it to "gloo"'
        )
    if place.num_nodes > 1 and place.node_rank == 0:
        check_port(int(str(place.rendezvous).rpartition(":")[2]), f"RDZV_ENDPOINT={place.rendezvous}")
    address, lighthouse = place.lighthouse, None
    if address is None and len(numbers) > 1:
        port = recipe.fault_tolerance.lighthouse_port or free_port()
        check_port(port, "fault_tolerance.lighthouse_port")
        address = f"http://127.0.0.1:{port}"
        lighthouse = Child(
            "the lighthouse", lighthouse_command(recipe, port), {"RUST_LOG": _rust_log()}, folder / "lighthouse.log"
        )
    groups = {}
    for position, group in enumerate(numbers):
        share = gpus[position * place.ranks_here : (position + 1) * place.ranks_here] if on_gpu else []
        environment = group_environment(group, address, folder, share)
        if place.only_group is None:
            environment["ALL_GROUPS_HERE"] = "1"  # so no group asks a person to start the others
        log = "log.txt" if place.node_rank == 0 else f"log.{place.node_rank}.txt"
        groups[group] = Child(
            f"group {group}",
            group_command(place, group, folder / "config.toml", command),
            environment,
            replica_folder(folder, group) / log,
        )
    return Plan(groups, lighthouse, "GPU" if on_gpu else "CPU")


def lighthouse_command(recipe: Recipe, port: int) -> list[str]:
    groups = recipe.fault_tolerance
    program = shutil.which("torchft_lighthouse", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if program is None:
        raise LaunchError("torchft_lighthouse is not installed beside this Python: pip install torchft")
    return [
        program,
        "--bind", f"127.0.0.1:{port}",  # all groups are on this machine, and nobody else is to reach it
        "--min_replicas", "1",  # how many may start or commit is the round's decision, not the lighthouse's
        "--join_timeout_ms", str(int(groups.join_timeout_seconds * 1000)),
        "--heartbeat_timeout_ms", str(int(groups.heartbeat_timeout_seconds * 1000)),
        "--quorum_tick_ms", "100",
    ]  # fmt: skip


def group_command(place: Place, group: int, config_file: Path, command: Command) -> list[str]:
    """The torchrun job of one group, on this node."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--max-restarts", "0", "--log-dir", os.devnull]
    torchrun += ["--nproc-per-node", str(place.ranks_here)]
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


def group_environment(group: int, lighthouse: str | None, folder: Path, gpus: Sequence[str]) -> dict[str, str]:
    """What the processes of one group find in their environment beside the launcher's."""
    environment = {
        "REPLICA_ID": str(group),
        "RUN_FOLDER": str(folder.resolve()),
        "CUDA_VISIBLE_DEVICES": ",".join(gpus),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "RUST_LOG": _rust_log(),
    }
    if lighthouse:
        environment["TORCHFT_LIGHTHOUSE"] = lighthouse
    return environment


def _rust_log() -> str:
    """torchft writes several lines per second while a group waits, unless told not to."""
    return os.environ.get("RUST_LOG", "warn")


def find_gpus(environment: Mapping[str, str]) -> list[str]:
    """The GPUs that this machine offers, as CUDA_VISIBLE_DEVICES names them."""
    if (visible := environment.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name.strip() for name in visible.split(",") if name.strip()]
    if (program := shutil.which("nvidia-smi")) is None:
        return []
    listing = subprocess.run([program, "-L"], capture_output=True, text=True, check=False)
    return [str(index) for index, _ in enumerate(re.findall(r"^GPU ", listing.stdout, re.MULTILINE))]


# ---- what a person is told ----


def describe_start(plan: Plan, place: Place, recipe: Recipe, commands: Mapping[str, str]) -> str:
    """What is being started, for a person."""
    dp_shard, tp = ranks_per_group(recipe, place.num_ranks)
    groups = f"group {', '.join(map(str, plan.groups))} of {recipe.fault_tolerance.num_replica_groups}"
    nodes = f", this is node {place.node_rank} of {place.num_nodes}" * (place.num_nodes > 1)
    method = f"{recipe.outer.method} outside, {recipe.optimizer.name} inside"
    return "\n".join(
        [
            f"{groups}, {place.num_ranks} ranks each (FSDP {dp_shard} x TP {tp}) on {plan.device}{nodes}: "
            f"model {recipe.model.flavor}, {method}",
            f"{recipe.training.steps} steps, a round every {recipe.outer.sync_steps}; "
            f"files in {recipe.job.dump_folder}/",
            *[
                f"group {group} comes in addition to the {planned} groups that the recipe plans, 0 to {planned - 1}"
                for planned in [recipe.fault_tolerance.num_replica_groups]
                for group in plan.groups
                if group >= planned
            ],
            *[f"note: {line}" for line in unused_keys(recipe)],
            *command_lines(commands),
        ]
    )


def useful_commands(recipe: Recipe, plan: Plan) -> dict[str, str]:
    """What one may want to do while the run goes on -> the command for it."""
    python, folder = shlex.quote(_shown(Path(sys.executable))), shlex.quote(recipe.job.dump_folder)
    commands = {"kill a group": f"{python} -m tools.kill_group {folder} {list(plan.groups)[-1]}"}
    if recipe.metrics.enable_tensorboard:
        commands["watch"] = f"{python} -m tensorboard.main --logdir {folder}"
    return commands


def resume_command(arguments: Sequence[str], environment: Mapping[str, str]) -> str:
    """The command that goes on with the run that these arguments and this environment started."""
    variables = ["NGPU", "LOG_RANK", "TRAIN_FILE", "TORCHFT_LIGHTHOUSE", "ONLY_GROUP", "NNODES", "NODE_RANK"]
    variables += ["RDZV_ENDPOINT", "LOCAL_ADDR"]
    settings = [
        f"{name.replace('ONLY_GROUP', 'REPLICA_ID')}={shlex.quote(environment[name])}"
        for name in variables
        if environment.get(name)
    ]
    script = _shown(Path(__file__).parent.parent / "run_train.sh")
    return " ".join([*settings, shlex.join([script, *(argument for argument in arguments if argument != "--fresh")])])


def _shown(program: Path) -> str:
    """As short as a program can be named here so that a shell finds it."""
    relative = os.path.relpath(program)
    return min(relative if os.sep in relative else os.path.join(".", relative), str(program.absolute()), key=len)


# ---- the program ----


def main(arguments: Sequence[str]) -> int:
    options = read_options(arguments)
    if options.help:
        print(f"usage: ./run_train.sh [OPTIONS] [--section.key VALUE ...]\n\n{USAGE}\n{help_text()}")
        return 0
    command, recipe = parse_command(arguments)
    place = read_place(os.environ, recipe)
    if command.validate:
        print(f"{command.config_file or 'the debug recipe'}: ok\n{describe(recipe, place.num_ranks)}")
        try:
            check_files(recipe)
        except ValueError as error:
            print(f"  note    it cannot be started on this machine as it is: {error}")
        return 0
    if recipe.job.print_config:
        print(recipe_to_toml(recipe))
    check_files(recipe)
    folder = Path(recipe.job.dump_folder)
    with contextlib.ExitStack() as locks:
        locks.enter_context(lock_folder(folder, shared=place.only_group is not None))
        if place.only_group is not None:
            locks.enter_context(lock_folder(folder, f".lock.{place.only_group}.{place.node_rank}"))
        if not command.fresh and (changes := changed_keys(folder, recipe)):
            say(f"the recipe differs from the one that this folder's run was last started with: {changes}")
        if not command.fresh and is_complete(folder, recipe):
            say(f"the run in {folder} is complete; to train on, raise training.steps; to start over, say --fresh")
            return 0
        if place.lighthouse:
            check_lighthouse(place.lighthouse)
        plan = make_plan(recipe, place, command)
        return launch(recipe, place, command, plan, resume_command(arguments, os.environ))


def is_complete(folder: Path, recipe: Recipe) -> bool:
    """Whether the run in the folder has been brought to its end, and the recipe asks for no further steps."""
    summary = SummaryFiles(folder, {}).read()
    return summary.get("status") == "completed" and summary.get("steps", 0) >= recipe.training.steps


def changed_keys(folder: Path, recipe: Recipe) -> str:
    """What has changed of the recipe since the run in the folder was started last; empty if nothing that matters."""
    try:
        before = load_recipe(folder / "config.toml")
    except RecipeError:
        return ""
    return config_diff(hashed_items(recipe), hashed_items(before))


def launch(recipe: Recipe, place: Place, command: Command, plan: Plan, resume: str) -> int:
    """Run to the end and leave a summary. Bad input that nobody began to work on leaves the folder as it was."""
    folder = Path(recipe.job.dump_folder)
    config_file = folder / "config.toml"
    config_before = config_file.read_text() if config_file.exists() else None
    summaries = SummaryFiles.before_launch(folder, list(plan.groups))
    supervisor = Supervisor(
        plan.groups,
        plan.lighthouse,
        max_restarts=recipe.fault_tolerance.max_restarts,
        min_groups=min_replica_groups(recipe) if place.only_group is None else 1,
        grace_seconds=recipe.checkpoint.grace,
        shown_ranks=place.shown_ranks,
        show_everything=command.debug,
    )
    write_atomically(config_file, recipe_to_toml(recipe))
    commands = useful_commands(recipe, plan)
    say(describe_start(plan, place, recipe, commands))
    status = supervisor.run()
    if supervisor.refused and not summaries.of_this_launch():
        if config_before is None:
            config_file.unlink()
        else:
            write_atomically(config_file, config_before)
        return status
    completed = {group: child.completed for group, child in plan.groups.items()}
    summary = summaries.merge(supervisor.status, completed, sum(child.restarts for child in plan.groups.values()))
    summaries.write(summary)
    if summary["rounds"] or supervisor.status != "failed":
        say(describe_end(summary, recipe, {"resume": resume} | commands))
    return status


def run() -> None:
    """The program: errors that a person can mend are one line."""
    try:
        status = main(sys.argv[1:])
    except (ValueError, OSError) as error:
        if "--debug" in sys.argv:
            raise
        problems = error.problems if isinstance(error, RecipeError) else [str(error)]
        say("\n".join(f"error: {problem}" for problem in problems), sys.stderr)
        status = EXIT_BAD_INPUT if isinstance(error, ValueError) else 1
    except KeyboardInterrupt:
        status = EXIT_STOPPED  # nothing had been started yet
    sys.exit(status)


if __name__ == "__main__":
    run()
