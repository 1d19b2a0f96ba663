"""What the programs of this folder take on the command line, beside the recipe's keys."""

import socket
from collections.abc import Sequence
from dataclasses import dataclass

from recipes.config import Recipe, RecipeError
from recipes.recipe_file import load_recipe

USAGE = """\
Options:
  --job.config_file FILE   the recipe (default: the embedded train_configs/debug.toml)
  --fresh                  start over: set aside the checkpoints and the run files in job.dump_folder
  --validate               check the recipe and stop
  --debug                  print tracebacks of errors
  --help                   this text
"""


@dataclass(frozen=True)
class Command:
    """A program's options, and the arguments that set the recipe."""

    config_file: str | None
    overrides: list[str]
    fresh: bool = False
    validate: bool = False
    debug: bool = False
    help: bool = False


def parse_command(arguments: Sequence[str]) -> tuple[Command, Recipe]:
    """The options and the recipe that the arguments give. Raises RecipeError."""
    command = read_options(arguments)
    return command, load_recipe(command.config_file, command.overrides)


def read_options(arguments: Sequence[str]) -> Command:
    """The options; whatever is none is an override of the recipe."""
    config_file: str | None = None
    switches = {"--fresh": False, "--validate": False, "--debug": False, "--help": False}
    overrides: list[str] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if argument == "-h":
            argument = "--help"
        if argument in switches:
            switches[argument] = True
        elif argument == "--job.config_file":
            if not rest:
                raise RecipeError("--job.config_file needs a file name")
            config_file = rest.pop(0)
        elif argument.startswith("--job.config_file="):
            config_file = argument.partition("=")[2]
        else:
            overrides.append(argument)
            if argument.startswith("--") and "=" not in argument and rest:
                overrides.append(rest.pop(0))  # its value, which may look like an option
    return Command(config_file, overrides, **{switch[2:]: value for switch, value in switches.items()})


def free_port() -> int:
    """A TCP port that nothing listens at."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
