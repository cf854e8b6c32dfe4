#!/bin/bash
# Written by ddp-hpc 0.2.0 with: ddp-hpc render --profile local --ranks-per-node 2

set -eo pipefail
# Unless a conda environment other than base is active: activate the virtual environment of the submitting shell, or .venv.
# shellcheck disable=SC1091
if [[ ${CONDA_DEFAULT_ENV:-base} == base && -f ${VIRTUAL_ENV:-.venv}/bin/activate ]]; then source "${VIRTUAL_ENV:-.venv}/bin/activate"; fi

num_nodes=1
num_ranks=$((num_nodes * 2))
# Read by ddp-hpc: the site.
export DDP_HPC_PROFILE=local
# Snapshots of this run. A job with the same directory resumes the run.
export DDP_HPC_RUN_DIR="$PWD"/runs/ddp

# ddp_hpc.job starts the program in the last line, and prints how to resume the run.
# ddp-hpc must be installed in the Python environment of the job; otherwise, render the script with --standalone.
exec python -m ddp_hpc.job --scheduler local --script "$0" -- \
  mpiexec -n "$num_ranks" --ppn 2 \
  python -m ddp_hpc.train "$@"
