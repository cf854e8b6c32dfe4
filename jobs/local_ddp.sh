#!/bin/bash
# Written by ddp-hpc 0.2.0 with: ddp-hpc render --profile local --ranks-per-node 2

set -euo pipefail

# Activate the virtual environment .venv of this directory, unless another environment is already active.
if [[ -z ${VIRTUAL_ENV:-}${CONDA_PREFIX:-} && -f .venv/bin/activate ]]; then
  set +u
  # shellcheck disable=SC1091
  source .venv/bin/activate
  set -u
fi

num_nodes=1
num_ranks=$((num_nodes * 2))

# Environment variables for the ranks.
export DDP_HPC_PROFILE=local
export DDP_HPC_RUN_DIR="$PWD"/runs/ddp

# Use the first mpiexec on the PATH that is an MPI launcher.
mpiexec=${DDP_HPC_MPIEXEC:-}
while [[ -z $mpiexec ]] && IFS= read -r candidate; do
  version=$("$candidate" --version </dev/null 2>/dev/null) || continue
  if [[ $version == pbs_version* ]]; then continue; fi
  mpiexec=$candidate
done < <(type -aP mpiexec || true)
if ! type -P "$mpiexec" >/dev/null; then
  echo "error: the MPI launcher ${mpiexec:-mpiexec} was not found on the PATH; load the MPI module (ddp-hpc render --setup 'module load ...') or install the PyPI package mpich" >&2
  exit 2
fi
# The option for the number of ranks per node depends on the MPI implementation.
case $("$mpiexec" --version 2>&1 || true) in
  *"Open MPI"* | *OpenRTE* | *PRRTE*)
    per_node=(--map-by ppr:2:node:OVERSUBSCRIBE --bind-to none)
    # Open MPI passes only named variables on to other nodes.
    for name in PATH LD_LIBRARY_PATH PYTHONPATH DDP_HPC_PROFILE DDP_HPC_RUN_DIR; do
      if [[ -v $name ]]; then per_node+=(-x "$name"); fi
    done
    ;;
  *HYDRA* | *Hydra* | *"Intel(R) MPI"*) per_node=(-ppn 2) ;;
  *) per_node=(--ppn 2) ;;
esac

echo "ddp-hpc: $num_nodes nodes, $num_ranks ranks, by mpiexec ($mpiexec)"
# The launcher runs in the background: bash runs a trap only after the foreground command has ended.
"$mpiexec" -n "$num_ranks" "${per_node[@]}" \
  python -m ddp_hpc.train &
launcher=$!
forward_term=(kill -TERM "$launcher")
stopped=false
# CONT is not trapped: Slurm sends it right after other signals, and bash would lose those.
trap 'stopped=true; "${forward_term[@]}" 2>/dev/null || true' TERM INT
code=0
wait "$launcher" || code=$?
# A signal interrupts `wait`. The next `wait` returns the exit code of the launcher.
while $stopped; do
  stopped=false
  code=0
  wait "$launcher" || code=$?
done
exit "$code"
