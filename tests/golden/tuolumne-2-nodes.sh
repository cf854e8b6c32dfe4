#!/bin/bash
#flux: --job-name=ddp
#flux: --nodes=2
#flux: --exclusive
#flux: --time-limit=1800s
#flux: --queue=pdebug
#flux: --output=ddp-{{id}}.out
# Written by ddp-hpc 0.2.0 with: ddp-hpc render --profile tuolumne --nodes 2

set -eo pipefail
: "${FLUX_URI:?is not set; submit this script with flux batch}"
# Unless a conda environment other than base is active, activate .venv in this directory, or $VIRTUAL_ENV if it was passed to the job.
# shellcheck disable=SC1091
if [[ ${CONDA_DEFAULT_ENV:-base} == base && -f ${VIRTUAL_ENV:-.venv}/bin/activate ]]; then source "${VIRTUAL_ENV:-.venv}/bin/activate"; fi

num_nodes=$(flux resource list -s up -no '{nnodes}')
export OMP_NUM_THREADS=21
export DDP_HPC_PROFILE=tuolumne  # the default profile of ddp-hpc's commands in this job
# The snapshots (checkpoints) of this run. A job with the same directory resumes the run.
export DDP_HPC_RUN_DIR="$PWD"/runs/ddp
if ((num_nodes > 1)); then
  # The Slingshot network; RCCL would select the 1 Gb/s management interface.
  export NCCL_SOCKET_IFNAME=hsi0  # network interface with which NCCL connects the ranks
fi

# ddp_hpc.job, a part of ddp-hpc (which must be installed), runs the launch command after `--`. The last line is the command that each rank runs.
# If the run is not complete at the end, ddp_hpc.job prints how to resume it.
# --walltime: the time limit, if the scheduler does not report it.
# ddp_hpc.train trains a Transformer on synthetic data. For your own program: ddp-hpc render --profile tuolumne --nodes 2 -- python PROGRAM.py
exec python -m ddp_hpc.job --scheduler flux --script "$0" --walltime 00:30:00 -- \
  flux run --exclusive --nodes="$num_nodes" --tasks-per-node=4 \
  env -u ROCR_VISIBLE_DEVICES -u HIP_VISIBLE_DEVICES -u CUDA_VISIBLE_DEVICES python -m ddp_hpc.train
