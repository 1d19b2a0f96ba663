"""run_train.sh sets itself up once, and an attempt that failed is not taken for one that succeeded."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
# Plays a Python that lacks the packages: `-c` is the question for its version, `-` the one for the packages.
FAKE_PYTHON = """#!/bin/sh
case "$1" in
    -c) exit 0 ;;
    -) cat > /dev/null; exit 1 ;;
esac
case "$1 $2" in
    "-m venv")
        echo venv >> "$CALLS"
        [ "$BROKEN" = venv ] && { echo "no ensurepip" >&2; exit 1; }
        mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    "-m pip")
        echo "$*" >> "$CALLS"
        [ "$BROKEN" = pip ] && { echo "no network" >&2; exit 1; }
        exit 0 ;;
esac
"""


@pytest.fixture
def want_python(tmp_path):
    """Run want_python in a copy of the repository's setup files, with only the fake Python on PATH."""
    root, programs, calls = tmp_path / "root", tmp_path / "bin", tmp_path / "calls"
    shutil.copytree(ROOT / "tools" / "setup", root / "tools" / "setup")
    shutil.copy(ROOT / "pyproject.toml", root)
    programs.mkdir()
    fake = programs / "python3"
    fake.write_text(FAKE_PYTHON)
    fake.chmod(0o755)
    for name in ("bash", "sh", "cat", "cksum", "cut", "dirname", "flock", "mkdir", "cp", "touch", "tail"):
        (programs / name).symlink_to(shutil.which(name))

    def run(broken="", extras=""):
        source = f"set -euo pipefail; source {root}/tools/setup/environment.sh"
        script = f'{source}; want_python "{extras}" "torch"; echo "$python"'
        environment = {"PATH": str(programs), "CALLS": str(calls), "BROKEN": broken, "HOME": os.environ["HOME"]}
        result = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, timeout=30)
        result.calls = calls.read_text().splitlines() if calls.exists() else []
        calls.unlink(missing_ok=True)
        return result

    run.root = root
    return run


def test_an_environment_is_made_once(want_python):
    first, second = want_python(), want_python()
    assert first.returncode == second.returncode == 0
    assert first.stdout == second.stdout == f"{want_python.root}/.venv/bin/python\n"
    assert first.calls[0] == "venv"
    assert f"-c {want_python.root}/tools/setup/constraints.txt -e {want_python.root}" in first.calls[1]
    assert second.calls == []


@pytest.mark.parametrize(("step", "reason"), [("venv", "no ensurepip"), ("pip", "no network")])
def test_one_that_could_not_be_made_is_an_error_with_its_reason_and_is_tried_again(want_python, step, reason):
    failed = want_python(broken=step)
    assert failed.returncode == 2
    assert reason in failed.stderr
    assert f"whole output is in {want_python.root}/.venv.log" in failed.stderr
    assert failed.stdout == ""
    assert want_python().calls, "the failed attempt does not count"


def test_other_packages_are_another_environment(want_python):
    want_python()
    assert want_python(extras="[test]").calls
    (want_python.root / "tools/setup/constraints.txt").write_text("torch==9.9\n")
    assert want_python(extras="[test]").calls


def test_without_python_it_says_what_to_install(tmp_path):
    for name in ("bash", "dirname"):
        (tmp_path / name).symlink_to(shutil.which(name))
    script = f'source {ROOT}/tools/setup/environment.sh; want_python "" "torch"'
    result = subprocess.run(["bash", "-c", script], env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr == "error: no Python 3.10 or newer was found; install one and put it on PATH\n"
