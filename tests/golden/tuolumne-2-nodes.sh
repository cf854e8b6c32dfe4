#!/bin/bash
#flux: --job-name=ddp
#flux: --nodes=2
#flux: --exclusive
#flux: --time-limit=1800s
#flux: --queue=pdebug
#flux: --output=ddp-{{id}}.out
# Written by ddp-hpc 0.2.0 with: ddp-hpc render --profile tuolumne --nodes 2
# Tuolumne (LLNL) requires an account, but this script does not set one; submit it with: flux batch --setattr=bank=PROJECT SCRIPT

set -eo pipefail
: "${FLUX_URI:?is not set; submit this script with flux batch}"
# Unless a conda environment other than base is active: activate the virtual environment of the submitting shell, or .venv.
# shellcheck disable=SC1091
if [[ ${CONDA_DEFAULT_ENV:-base} == base && -f ${VIRTUAL_ENV:-.venv}/bin/activate ]]; then source "${VIRTUAL_ENV:-.venv}/bin/activate"; fi

num_nodes=$(flux resource list -s up -no '{nnodes}')
export OMP_NUM_THREADS=1
# Read by ddp-hpc: the site.
export DDP_HPC_PROFILE=tuolumne
# Snapshots of this run. A job with the same directory resumes the run.
export DDP_HPC_RUN_DIR="$PWD"/runs/ddp

# ddp_hpc.job starts the program in the last line, and prints how to resume the run.
# ddp-hpc must be installed in the Python environment of the job; otherwise, render the script with --standalone.
exec python -m ddp_hpc.job --scheduler flux --script "$0" --walltime 00:30:00 -- \
  flux run --exclusive --nodes="$num_nodes" --tasks-per-node=4 \
  python -m ddp_hpc.train "$@"
