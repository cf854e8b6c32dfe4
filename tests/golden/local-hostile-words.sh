#!/bin/bash
# Written by ddp-hpc 0.2.0 with: ddp-hpc render --profile local --env $'GREETING=it\'s "$HOME"\nand `more`' -- ./run.sh 'two words' '$(touch canary)' $'line\nbreak' '' '*'

set -eo pipefail
# Activate the virtual environment .venv of this directory, unless one other than conda's base is already active.
# shellcheck disable=SC1091
if [[ -z $VIRTUAL_ENV && ${CONDA_DEFAULT_ENV:-base} == base && -f .venv/bin/activate ]]; then source .venv/bin/activate; fi

num_nodes=1
num_ranks=$num_nodes
# For ddp-hpc: the site.
export DDP_HPC_PROFILE=local
# The directory of this run: its snapshots and its state.
export DDP_HPC_RUN_DIR="$PWD"/runs/ddp
# Your own variables (--env).
export GREETING=$'it\'s "$HOME"\nand `more`'

# ddp_hpc.job starts the launcher, and prints how to resume the run.
# ddp-hpc must be installed in the Python environment of the job; otherwise, render the script with --standalone.
exec python -m ddp_hpc.job --scheduler local --script "$0" -- \
  mpiexec -n "$num_ranks" --ppn 1 \
  ./run.sh 'two words' '$(touch canary)' $'line\nbreak' '' '*'
