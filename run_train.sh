#!/usr/bin/env bash
# Train: sets up .venv if the running Python lacks the packages, then starts a run from a recipe.
#
#   ./run_train.sh [--section.key VALUE ...]     every key of the recipe is a flag; --help lists them, --validate checks
#
# From the environment:
#   CONFIG_FILE         the recipe (default: train_configs/debug.toml)
#   NGPU                ranks per replica group (default: the product of the recipe's degrees)
#   LOG_RANK            whose lines to show, e.g. 0 or 0,1 (default: the first one on this machine)
#   TRAIN_FILE          the module that each rank runs (default: recipes.train)
#   TORCHFT_LIGHTHOUSE  http://host:port of the run to join, with REPLICA_ID: start this one group only
#   REPLICA_ID          the number of this group
#   NNODES, NODE_RANK, RDZV_ENDPOINT    a group on several nodes: run this on each of them
#   LOCAL_ADDR          the name or address under which other machines reach this one (default: the host's name)
#
# Exit status: 0 the run is complete, 2 bad input, 75 stopped by a signal (the same command goes on), 1 it failed.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/tools/setup/environment.sh"
want_python "" "torch torchft torchdata numpy tomli tensorboard tiktoken"

if [ -n "${CONFIG_FILE:-}" ]; then set -- --job.config_file "$CONFIG_FILE" "$@"; fi
# REPLICA_ID marks the processes of a group. The launcher is none of them, so it gets the number under another name.
if [ -n "${REPLICA_ID:-}" ]; then
    only="$REPLICA_ID"
    unset REPLICA_ID
    exec env ONLY_GROUP="$only" "$python" -m recipes.launch "$@"
fi
exec "$python" -m recipes.launch "$@"
