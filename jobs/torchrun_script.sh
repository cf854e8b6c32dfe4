#!/bin/bash
# Written by ddp-hpc 0.2.0 with: ddp-hpc render --step
#
# This script starts one torchrun agent on this node. Run it once per node with srun or mpiexec:
#
#   srun --nodes=2 torchrun_script.sh                         train the default job on all GPUs of two nodes
#   srun --nodes=2 torchrun_script.sh --epochs 3              train it with options of ddp_hpc.train
#   srun --nodes=2 torchrun_script.sh -m my.module --lr 0.1   run your own module
#   srun --nodes=2 torchrun_script.sh train.py --lr 0.1       run your own file
#   mpiexec -n 2 --ppn 1 torchrun_script.sh                   train the default job under PBS
#
# Environment variables:
#
# DDP_HPC_RANKS_PER_NODE   number of ranks per node (default: the number of GPUs, or 1 without GPUs)
# DDP_HPC_MAX_RESTARTS     maximum number of times that torchrun restarts the ranks (default: 3)
# DDP_HPC_INIT_TIMEOUT_S   time in seconds that the nodes wait for each other (default: 300)
# DDP_HPC_RDZV_BACKEND     ddp-hpc (default), or c10d for torchrun's own rendezvous, which any user of the network
#                          can join

set -euo pipefail
# Activate the virtual environment as the job script does, in case srun was started without one.
if [[ -z ${VIRTUAL_ENV:-} && ${CONDA_DEFAULT_ENV:-base} == base && -f .venv/bin/activate ]]; then
  set +u
  # shellcheck disable=SC1091
  source .venv/bin/activate
  set -u
fi
python=$(type -P python || type -P python3 || true)
if [[ -z $python ]]; then
  echo "error: torchrun_script.sh on ${HOSTNAME:-this node}: python was not found on the PATH; load the module that provides it, or create the virtual environment .venv in $PWD" >&2
  exit 2
fi
exec "$python" -m ddp_hpc.torchrun.step "$@"
