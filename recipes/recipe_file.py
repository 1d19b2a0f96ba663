"""Recipes as TOML files and command-line flags: read, explained, written, compared."""

import ast
import hashlib
import inspect
import json
import re
import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import tomli

from recipes.check_recipe import check_recipe, check_value, choices, nearest, quote, split_type, suggestion
from recipes.config import KEYS, SECTIONS, Recipe, RecipeError, flatten
from recipes.torchtitan_keys import TORCHTITAN_KEYS

# A symbolic link to train_configs/debug.toml: one file in the repository, package data in a wheel.
DEBUG_RECIPE = Path(__file__).with_name("debug.toml")
# A real recipe has a few thousand; this keeps a wrong file, or a device, from being read and searched to its end.
MAX_BYTES = 65536
COMMAND_LINE = "command line"


class Setting(NamedTuple):
    """One key as somebody set it, and a way to find out where."""

    value: object
    where: Callable[[], str]


def load_recipe(config_file: str | Path | None = None, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe in a TOML file (None: the embedded debug recipe), with overrides such as ["--outer.lr", "1.6"].

    Raises RecipeError, one line: file and line (or "command line"), key, what is wrong and the nearest valid name. Its
    `problems` has every value and key that is wrong by itself; its message is the first.
    """
    path = shown_path(DEBUG_RECIPE) if config_file is None else str(config_file)
    settings = {**read_file(path), **read_flags(overrides)}
    sections: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    problems = []
    for name, setting in settings.items():
        section, _, key = name.partition(".")
        try:
            if name in KEYS:
                sections[section][key] = check_value(setting.value, KEYS[name])
            elif not asks_for_nothing(name, setting.value):
                problems.append(f"{setting.where()}: {unknown_key(name)}")
        except ValueError as error:
            problems.append(f"{setting.where()}: {name} = {quote(setting.value)}: {error}")
    if problems:
        raise RecipeError(problems[0], problems=tuple(problems))
    recipe = Recipe(**{section: cls(**sections[section]) for section, cls in SECTIONS.items()})
    try:
        check_recipe(recipe)
    except RecipeError as error:
        places = [settings[key].where() for key in error.keys if key in settings]
        # Of several keys that do not go together, the one given as a flag is the one that somebody has just changed.
        where = COMMAND_LINE if COMMAND_LINE in places else [*places, path][0]
        raise RecipeError(f"{where}: {error}", *error.keys) from None
    return recipe


# --- Reading --------------------------------------------------------------------------------------------------------


def shown_path(path: Path) -> str:
    """As short as it can be written from here."""
    path = path.resolve()
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def read_file(path: str) -> dict[str, Setting]:
    """The settings of a TOML file by key, "section.key". Keys need not be known ones."""
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise RecipeError(f"{path}: cannot read this recipe: {reason}; check the path (CONFIG_FILE)") from None
    if len(data) > MAX_BYTES:
        raise RecipeError(f"{path}: not a recipe: larger than {MAX_BYTES} bytes; check the path (CONFIG_FILE)")
    try:
        text = data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise RecipeError(f"{path}:{line}: a recipe is a TOML file in UTF-8, and this is not UTF-8") from None
    try:
        tables = tomli.loads(text)
    except ValueError as error:
        end = re.search(r" \(at (?:line (\d+), column \d+|end of document)\)$", str(error))
        line = int(end[1]) if end and end[1] else text.count("\n") + 1
        reason = str(error)[: end.start()] if end else str(error)
        raise RecipeError(f"{path}:{line}: not valid TOML: {reason}") from None
    except RecursionError:
        raise RecipeError(f"{path}: not a recipe: nested too deeply") from None
    settings = {}
    for section, table in tables.items():
        if not isinstance(table, dict):
            raise RecipeError(f"{place(path, text, section)}: {not_a_section(section)}")
        if section not in SECTIONS and not any(f"{section}.{key}" in TORCHTITAN_KEYS for key in table):
            settings[section] = Setting(table, partial(place, path, text, section))
            continue
        for key, value in table.items():
            settings[f"{section}.{key}"] = Setting(value, partial(place, path, text, section, key))
    return settings


def place(path: str, text: str, *names: str) -> str:
    return f"{path}:{line_of(text, *names)}"


def line_of(text: str, *names: str) -> int:
    """The line on which a key (its section, its name) of valid TOML `text` is set, counting from 1.

    Found by parsing ever longer beginnings of the text, which holds for every way to write a key that TOML has.
    """
    lines = text.split("\n")
    first = 1
    for last in range(1, len(lines) + 1):
        try:
            found: Any = tomli.loads("\n".join(lines[:last]))
        except ValueError:
            continue  # inside of a value of several lines
        for name in names:
            found = found.get(name) if isinstance(found, dict) else None
        if found is not None:
            return first
        first = last + 1
    raise AssertionError(f"{names} is not in the text")


def read_flags(overrides: Sequence[str]) -> dict[str, Setting]:
    """The settings by key of flags "--section.key VALUE" or "--section.key=VALUE"; of a repeated flag the last wins."""
    settings = {}
    arguments = iter(overrides)
    for argument in arguments:
        if not argument.startswith("--"):
            raise RecipeError(
                f"{COMMAND_LINE}: unexpected argument {quote(argument)}: an override looks like --outer.lr 1.6"
            )
        name, equals, text = argument[2:].partition("=")
        value = text if equals else next(arguments, None)
        if name not in KEYS:
            settings[name] = Setting(value, lambda: COMMAND_LINE)
            continue
        if value is None or (not equals and value.startswith("--")):
            hint = " (true or false)" if KEYS[name] is bool else ""
            raise RecipeError(f"{COMMAND_LINE}: --{name} needs a value{hint}", name)
        settings[name] = Setting(flag_value(value, KEYS[name]), lambda: COMMAND_LINE)
    return settings


def flag_value(text: str, hint: Any) -> object:
    """The value that `text` stands for, or the text itself where it stands for none: checking that comes later."""
    kind, _ = split_type(hint)
    if kind is bool:
        return {"true": True, "false": False}.get(text, text)
    if kind == list[str]:
        if text.lstrip().startswith("["):
            try:
                return json.loads(text)
            except (ValueError, RecursionError):
                return text
        return [element.strip() for element in text.split(",") if element.strip()]
    if kind in (int, float):
        for number in (int, kind):
            try:
                return number(text)
            except ValueError:
                continue
    return text


# --- Explaining -----------------------------------------------------------------------------------------------------


def asks_for_nothing(name: str, value: object) -> bool:
    """Whether this is a key of torchtitan's at a value that means what happens here anyway."""
    harmless = TORCHTITAN_KEYS[name].harmless if name in TORCHTITAN_KEYS else None
    return type(value) is type(harmless) and value == harmless and harmless is not None


def unknown_key(name: str) -> str:
    """What is wrong with a key or section that does not exist, and what to write instead."""
    section, _, key = name.partition(".")
    for known in (name, section):
        if known in TORCHTITAN_KEYS:
            return f"torchtitan's {printable(known)}: {TORCHTITAN_KEYS[known].advice}"
    if section not in SECTIONS:
        if near := [known for known in KEYS if known.endswith(f".{name}")]:
            return f"{printable(name)}: needs its section{suggestion(near)}"
        return f"{printable(section)}: no such section{suggestion(nearest(section, SECTIONS), SECTIONS)}"
    own = {known.partition(".")[2]: known for known in KEYS if known.startswith(f"{section}.")}
    near = [own[spelling] for spelling in nearest(key, own)] or [known for known in KEYS if known.endswith(f".{key}")]
    return f"{printable(name)}: no such key{suggestion(near, own.values())}"


def not_a_section(name: str) -> str:
    if name in SECTIONS:
        return f"{name}: is a section: write [{name}] on a line of its own, and its keys below"
    return unknown_key(name)


def printable(name: str) -> str:
    return name if re.fullmatch(r"[\w.-]+", name) else quote(name)


def help_text() -> str:
    """All sections and keys with type, default and what they mean, from the dataclasses of recipes/config.py."""
    lines = [
        "Every key of a recipe is a flag: --section.key VALUE or --section.key=VALUE. Flags win over the file, of a",
        "repeated flag the last wins. Booleans take true or false, lists a JSON list or words with commas.",
    ]
    defaults = flatten(Recipe())
    for section, cls in SECTIONS.items():
        lines += ["", *textwrap.wrap(f"[{section}] {inspect.cleandoc(cls.__doc__ or '')}", 118)]
        for key, doc in field_docs(cls).items():
            name = f"{section}.{key}"
            kind, limit = split_type(KEYS[name])
            values = " | ".join(map(quote, choices(kind))) or {list[str]: "list"}.get(kind) or kind.__name__
            must = f", {limit.says}" if limit else ""
            lines.append(f"  --{name}  {values}{must} (default {quote(defaults[name])})")
            lines += textwrap.wrap(doc, 118, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines) + "\n"


def field_docs(cls: type) -> dict[str, str]:
    """Field -> the string that stands below it in the source of the dataclass."""
    (definition,) = ast.parse(inspect.getsource(cls)).body
    assert isinstance(definition, ast.ClassDef)
    docs = {}
    for statement, below in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            assert isinstance(below, ast.Expr), f"{statement.target.id} is not documented"
            docs[statement.target.id] = " ".join(str(ast.literal_eval(below.value)).split())
    return docs


# --- Writing and comparing ------------------------------------------------------------------------------------------


def recipe_to_toml(recipe: Recipe) -> str:
    """The whole recipe as TOML; `load_recipe` reads back an equal one."""
    blocks: dict[str, list[str]] = {section: [f"[{section}]"] for section in SECTIONS}
    for name, value in flatten(recipe).items():
        section, _, key = name.partition(".")
        blocks[section].append(f"{key} = {quote(value)}")
    return "\n\n".join("\n".join(block) for block in blocks.values()) + "\n"


# Groups may differ in these and still train the same model together; a run goes on with other values of them.
UNHASHED_SECTIONS = ("job", "profiling", "metrics", "checkpoint", "validation")
UNHASHED_KEYS = (
    "training.steps",
    "training.dataset_path",  # sites keep their data where they like; the data's fingerprint is compared instead
    "lr_scheduler.total_steps",
    "fault_tolerance.replica_id",
    "fault_tolerance.lighthouse_port",
    "fault_tolerance.max_restarts",
    "fault_tolerance.process_group_timeout_seconds",
    "fault_tolerance.heartbeat_timeout_seconds",
    "fault_tolerance.join_timeout_seconds",
    "fault_tolerance.quorum_timeout_seconds",
    "fault_tolerance.start_wait_seconds",
)


def hashed_items(recipe: Recipe) -> dict[str, Any]:
    """What must be equal in all groups of a run: "section.key" -> value, which JSON can hold."""
    return {
        name: check_value(value, KEYS[name])
        for name, value in flatten(recipe).items()
        if name not in UNHASHED_KEYS and name.partition(".")[0] not in UNHASHED_SECTIONS
    }


def config_hash(recipe: Recipe) -> str:
    """16 hex digits over `hashed_items`."""
    return hashlib.sha256(json.dumps(hashed_items(recipe), sort_keys=True).encode()).hexdigest()[:16]


def config_diff(here: dict[str, Any], there: dict[str, Any]) -> str:
    """What differs between the `hashed_items` of two groups, on one line: "outer.lr: 1.8 here, 0.7 there; ..."."""
    differences = []
    for name in sorted({*here, *there}):
        a, b = (quote(items[name]) if name in items else "absent" for items in (here, there))
        if a != b:
            differences.append(f"{name}: {a} here, {b} there")
    return "; ".join(differences)
