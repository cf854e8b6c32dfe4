#!/bin/bash
# Written by ddp-hpc 0.2.0 with: ddp-hpc render --profile local --ranks-per-node 2 --walltime 00:10:00 --launcher torchrun

set -eo pipefail
# Unless a conda environment other than base is active, activate .venv in this directory, or $VIRTUAL_ENV if it was passed to the job.
# shellcheck disable=SC1091
if [[ ${CONDA_DEFAULT_ENV:-base} == base && -f ${VIRTUAL_ENV:-.venv}/bin/activate ]]; then source "${VIRTUAL_ENV:-.venv}/bin/activate"; fi

export DDP_HPC_RANKS_PER_NODE=2
export DDP_HPC_PROFILE=local  # the default profile of ddp-hpc's commands in this job
# The snapshots (checkpoints) of this run. A job with the same directory resumes the run.
export DDP_HPC_RUN_DIR="$PWD"/runs/ddp

# ddp_hpc.job, a part of ddp-hpc (which must be installed), runs the launch command after `--`. The last line is the command that each rank runs.
# If the run is not complete at the end, ddp_hpc.job prints how to resume it.
# --walltime: the time limit, if the scheduler does not report it.
# ddp_hpc.train trains a Transformer on synthetic data. For your own program: ddp-hpc render --profile local --ranks-per-node 2 --walltime 00:10:00 --launcher torchrun -- python PROGRAM.py
exec python -m ddp_hpc.job --scheduler local --script "$0" --walltime 00:10:00 -- \
  torchrun_script.sh python -m ddp_hpc.train "$@"
