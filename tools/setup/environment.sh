# Sourced by run_train.sh, run_tests.sh and .ci/run. Sets `python` to an interpreter that has what is needed:
# the running one if it has it, else that of .venv at the root, which is made if need be.
#   want_python EXTRAS MODULES    e.g.  want_python "[test]" "torch torchft pytest"

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"

has_modules() { # PYTHON MODULES
    "$1" - $2 >/dev/null 2>&1 <<'PYTHON'
import importlib.util, sys
from importlib.metadata import version
if sys.version_info < (3, 10) or any(importlib.util.find_spec(name) is None for name in sys.argv[1:]):
    sys.exit(1)
sys.exit(tuple(map(int, version("torch").split(".")[:2])) < (2, 11))  # the least that pyproject.toml asks for
PYTHON
}

find_python() {
    local candidate
    for candidate in python3 python python3.13 python3.12 python3.11 python3.10; do
        if command -v "$candidate" >/dev/null && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    echo "error: no Python 3.10 or newer was found; install one and put it on PATH" >&2
    return 2
}

want_python() { # EXTRAS MODULES
    local extras="$1" modules="$2" stamp base log
    python="$(find_python)" || exit 2
    if has_modules "$python" "$modules"; then return; fi
    base="$python"
    python="$root/.venv/bin/python"
    # The stamp is written last: a half-made environment has none, and a changed list of packages has another one.
    stamp="$root/.venv/.complete-$(cat "$root/tools/setup/constraints.txt" "$root/pyproject.toml" <(echo "$extras") | cksum | cut -d' ' -f1)"
    if [ -e "$stamp" ]; then return; fi
    log="$root/.venv.log"
    echo "setting up $root/.venv (once; a minute or more, depending on the network)" >&2
    # Each step hangs on the one before: in front of || a failing command does not end the subshell, even under set -e.
    (
        if command -v flock >/dev/null; then flock 9; fi
        if [ -e "$stamp" ]; then exit 0; fi
        "$base" -m venv "$root/.venv" &&
            "$python" -m pip install --quiet --disable-pip-version-check --config-settings editable_mode=compat \
                -c "$root/tools/setup/constraints.txt" -e "$root$extras" &&
            touch "$stamp"
    ) 9>"$root/.venv.lock" >"$log" 2>&1 || {
        tail -n 20 "$log" >&2
        echo "error: the packages could not be installed into $root/.venv; the whole output is in $log" >&2
        exit 2
    }
}
