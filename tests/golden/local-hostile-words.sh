#!/bin/bash
# Written by ddp-hpc 0.2.0 with: ddp-hpc render --profile local --env $'GREETING=it\'s "$HOME"\nand `more`' -- ./run.sh 'two words' '$(touch canary)' $'line\nbreak' '' '*'

set -eo pipefail
# Unless a conda environment other than base is active, activate .venv in this directory, or $VIRTUAL_ENV if it was passed to the job.
# shellcheck disable=SC1091
if [[ ${CONDA_DEFAULT_ENV:-base} == base && -f ${VIRTUAL_ENV:-.venv}/bin/activate ]]; then source "${VIRTUAL_ENV:-.venv}/bin/activate"; fi

num_nodes=1
num_ranks=$num_nodes
export DDP_HPC_PROFILE=local  # the default profile of ddp-hpc's commands in this job
# The snapshots (checkpoints) of this run. A job with the same directory resumes the run.
export DDP_HPC_RUN_DIR="$PWD"/runs/run
# Your own variables (--env).
export GREETING=$'it\'s "$HOME"\nand `more`'

# ddp_hpc.job, a part of ddp-hpc (which must be installed), runs the launch command after `--`. The last line is the command that each rank runs.
# If the run is not complete at the end, ddp_hpc.job prints how to resume it.
exec python -m ddp_hpc.job --scheduler local --script "$0" -- \
  mpiexec -n "$num_ranks" --ppn 1 \
  ./run.sh 'two words' '$(touch canary)' $'line\nbreak' '' '*' "$@"
