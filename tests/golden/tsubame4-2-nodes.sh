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
# The site's software.
module load cuda nccl openmpi
# Unless a conda environment other than base is active: activate the virtual environment of the submitting shell, or .venv.
# shellcheck disable=SC1091
if [[ ${CONDA_DEFAULT_ENV:-base} == base && -f ${VIRTUAL_ENV:-.venv}/bin/activate ]]; then source "${VIRTUAL_ENV:-.venv}/bin/activate"; fi

num_nodes=$NHOSTS
# Open MPI's list of hosts: the lines of Grid Engine's list have other columns after the name.
hosts=$(mktemp)
awk '{print $1, "slots=4"}' "$PE_HOSTFILE" >"$hosts"
num_ranks=$((num_nodes * 4))
export OMP_NUM_THREADS=1
# Read by ddp-hpc: the site.
export DDP_HPC_PROFILE=tsubame4
export DDP_HPC_FABRIC_INTERFACE=bond0
# Snapshots of this run. A job with the same directory resumes the run.
export DDP_HPC_RUN_DIR="$PWD"/runs/ddp

# ddp_hpc.job starts the program in the last line, and prints how to resume the run.
# ddp-hpc must be installed in the Python environment of the job; otherwise, render the script with --standalone.
exec python -m ddp_hpc.job --scheduler age --script "$0" --walltime 00:10:00 -- \
  mpiexec -n "$num_ranks" --ppn 4 --hostfile "$hosts" \
  python -m ddp_hpc.train "$@"
