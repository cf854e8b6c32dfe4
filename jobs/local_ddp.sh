#!/bin/bash
# Written by ddp-hpc 0.1.0 with: ddp-hpc render --profile local --ranks-per-node 2

set -euo pipefail

# A virtual environment beside the job, unless one is active already.
if [[ -z ${VIRTUAL_ENV:-}${CONDA_PREFIX:-} && -f .venv/bin/activate ]]; then
  set +u
  # shellcheck disable=SC1091
  source .venv/bin/activate
  set -u
fi

num_nodes=1
num_ranks=$((num_nodes * 2))

# What the ranks read.
export DDP_HPC_PROFILE=local
export DDP_HPC_RUN_DIR="$PWD"/runs/ddp

# The first mpiexec on the PATH that is an MPI launcher.
mpiexec=${DDP_HPC_MPIEXEC:-}
while [[ -z $mpiexec ]] && IFS= read -r candidate; do
  said=$("$candidate" --version </dev/null 2>/dev/null) || continue
  if [[ $said == pbs_version* ]]; then continue; fi
  mpiexec=$candidate
done < <(type -aP mpiexec || true)
if ! type -P "$mpiexec" >/dev/null; then
  echo "error: ${mpiexec:-mpiexec} was not found as an MPI launcher; load the MPI module (ddp-hpc render --setup 'module load ...') or install the PyPI package mpich" >&2
  exit 2
fi
# Three spellings of "so many ranks a node".
case $("$mpiexec" --version 2>&1 || true) in
  *"Open MPI"* | *OpenRTE* | *PRRTE*)
    per_node=(--map-by ppr:2:node:OVERSUBSCRIBE --bind-to none)
    # Open MPI hands the environment on to other nodes only by name.
    for name in PATH LD_LIBRARY_PATH PYTHONPATH DDP_HPC_PROFILE DDP_HPC_RUN_DIR; do
      if [[ -v $name ]]; then per_node+=(-x "$name"); fi
    done
    ;;
  *HYDRA* | *Hydra* | *"Intel(R) MPI"*) per_node=(-ppn 2) ;;
  *) per_node=(--ppn 2) ;;
esac

echo "ddp-hpc: $num_nodes nodes, $num_ranks ranks, by mpiexec ($mpiexec)"
# In the background, since bash runs a trap only after its foreground command.
"$mpiexec" -n "$num_ranks" "${per_node[@]}" \
  python -m ddp_hpc.train &
launcher=$!
hand_on=(kill -TERM "$launcher")
stopped=false
# Never CONT: Slurm sends it right after other signals, and bash would lose those.
trap 'stopped=true; "${hand_on[@]}" 2>/dev/null || true' TERM INT
code=0
wait "$launcher" || code=$?
# A trap cuts the wait short; the launcher's own exit code comes with the next one.
while $stopped; do
  stopped=false
  code=0
  wait "$launcher" || code=$?
done
exit "$code"
