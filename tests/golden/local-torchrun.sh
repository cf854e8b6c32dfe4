#!/bin/bash
# Written by ddp-hpc 0.2.0 with: ddp-hpc render --profile local --ranks-per-node 2 --walltime 00:10:00 --launcher torchrun

set -eo pipefail
# Activate the virtual environment .venv of this directory, unless one other than conda's base is already active.
# shellcheck disable=SC1091
if [[ -z $VIRTUAL_ENV && ${CONDA_DEFAULT_ENV:-base} == base && -f .venv/bin/activate ]]; then source .venv/bin/activate; fi

export DDP_HPC_RANKS_PER_NODE=2
# For ddp-hpc: the site.
export DDP_HPC_PROFILE=local
# The directory of this run: its snapshots and its state.
export DDP_HPC_RUN_DIR="$PWD"/runs/ddp

# ddp_hpc.job starts the launcher, and prints how to resume the run.
# ddp-hpc must be installed in the Python environment of the job; otherwise, render the script with --standalone.
exec python -m ddp_hpc.job --scheduler local --script "$0" --walltime 00:10:00 -- \
  torchrun_script.sh python -m ddp_hpc.train
