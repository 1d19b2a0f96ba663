"""What the README shows works: its Python runs, its flags are keys of a recipe, the files that it names are there."""

import re
import shlex
from pathlib import Path

import pytest

from recipes.command_line import parse_command

ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def shell_commands() -> list[list[str]]:
    text = "\n".join(block for language, block in BLOCKS if language == "bash").replace("\\\n", " ")
    return [shlex.split(line) for line in text.splitlines()]


@pytest.mark.parametrize("code", [block for language, block in BLOCKS if language == "python"])
def test_python_blocks_run(code):
    exec(compile(code, "README.md", "exec"), {})


@pytest.mark.parametrize("words", [words for words in shell_commands() if "./run_train.sh" in words], ids=" ".join)
def test_flags_of_run_train_are_accepted(words):
    before, arguments = words[: words.index("./run_train.sh")], words[words.index("./run_train.sh") + 1 :]
    variables = dict(word.split("=", 1) for word in before)
    if "CONFIG_FILE" in variables and variables["CONFIG_FILE"] != "recipe.toml":
        arguments = ["--job.config_file", str(ROOT / variables["CONFIG_FILE"]), *arguments]
    parse_command(arguments)
    assert all(name in (ROOT / "run_train.sh").read_text() for name in variables)


def test_flags_in_tables_are_keys():
    for cell in re.findall(r"^\|[^|]+\| `(--[^|]*?)`", README, re.MULTILINE):
        flags = [word.replace("PATH", "text").replace("FILE", "bpe.tiktoken") for word in shlex.split(cell)]
        parse_command(flags)


def test_named_files_exist():
    named = [target for target in re.findall(r"\]\(([^)#:]+)\)", README)]
    named += re.findall(r"\./(run_\w+\.sh)", README) + re.findall(r"train_configs/\w+\.toml", README)
    missing = [name for name in named if not (ROOT / name).exists()]
    assert not missing
    assert len(named) > 5
