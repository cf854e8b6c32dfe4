#!/bin/bash
#$ -N ddp
#$ -S /bin/bash
#$ -cwd
#$ -l node_f=2
#$ -l h_rt=00:10:00
#$ -j y
# Written by ddp-hpc 0.2.0 with: ddp-hpc render --profile tsubame4 --nodes 2
# TSUBAME4 (Science Tokyo) requires an account, but this script does not set one; submit it with: qsub -g PROJECT SCRIPT

set -eo pipefail
cd "${SGE_O_WORKDIR:?is not set; submit this script with qsub}"
# Load the site's software.
# shellcheck disable=SC1091
source /etc/profile.d/modules.sh
module purge
module load openmpi/5.0.7-gcc
# Unless a conda environment other than base is active, activate .venv in this directory, or $VIRTUAL_ENV if it was passed to the job.
# shellcheck disable=SC1091
if [[ ${CONDA_DEFAULT_ENV:-base} == base && -f ${VIRTUAL_ENV:-.venv}/bin/activate ]]; then source "${VIRTUAL_ENV:-.venv}/bin/activate"; fi

num_nodes=$NHOSTS
# Write a hostfile for Open MPI, because Grid Engine's hostfile has other columns after the host name.
hosts=$(mktemp)
awk '{print $1, "slots=4"}' "$PE_HOSTFILE" >"$hosts"
num_ranks=$((num_nodes * 4))
export OMP_NUM_THREADS=48
export DDP_HPC_PROFILE=tsubame4  # the default profile of ddp-hpc's commands in this job
export DDP_HPC_FABRIC_INTERFACE=bond0  # ranks connect through this network interface
# The snapshots (checkpoints) of this run. A job with the same directory resumes the run.
export DDP_HPC_RUN_DIR="$PWD"/runs/ddp

# ddp_hpc.job, a part of ddp-hpc (which must be installed), runs the launch command after `--`. The last line is the command that each rank runs.
# If the run is not complete at the end, ddp_hpc.job prints how to resume it.
# --walltime: the time limit, if the scheduler does not report it. --local-dir: the node's local disk, for kernels that torch.compile writes.
# ddp_hpc.train trains a Transformer on synthetic data. For your own program: ddp-hpc render --profile tsubame4 --nodes 2 -- python PROGRAM.py
exec python -m ddp_hpc.job --scheduler age --script "$0" --walltime 00:10:00 --local-dir "${T4TMPDIR:-/tmp}" -- \
  mpiexec -n "$num_ranks" --ppn 4 --hostfile "$hosts" \
  python -m ddp_hpc.train
