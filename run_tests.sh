#!/usr/bin/env bash
# Tests: sets up .venv if the running Python lacks the packages, then runs them.
#
#   ./run_tests.sh [pytest arguments]         all of them
#   ./run_tests.sh fast [pytest arguments]    those that together need less than three minutes
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/tools/setup/environment.sh"
want_python "[test,dev]" "torch torchft torchdata numpy tomli tensorboard tiktoken pytest pytest_timeout hypothesis ruff mypy"

cd "$root"
export OMP_NUM_THREADS=1
if [ "${1:-}" = fast ]; then
    shift
    set -- -m "not slow" "$@"
fi
exec "$python" -m pytest "$@"
