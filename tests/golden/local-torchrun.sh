#!/bin/bash
# Written by ddp-hpc 0.2.0 with: ddp-hpc render --profile local --ranks-per-node 2 --walltime 00:10:00 --launcher torchrun

set -euo pipefail

# Activate the virtual environment .venv of this directory, unless another environment is already active.
if [[ -z ${VIRTUAL_ENV:-}${CONDA_PREFIX:-} && -f .venv/bin/activate ]]; then
  set +u
  # shellcheck disable=SC1091
  source .venv/bin/activate
  set -u
fi

num_nodes=1

# Environment variables for the ranks.
export DDP_HPC_RANKS_PER_NODE=2
export DDP_HPC_PROFILE=local
export DDP_HPC_RUN_DIR="$PWD"/runs/ddp
# The time at which to stop, in Unix seconds. SECONDS is the time since this shell started.
DDP_HPC_DEADLINE=$(($(date +%s) - SECONDS + 600))
export DDP_HPC_DEADLINE

# Find the script that starts one torchrun agent per node: it is installed with ddp-hpc, or is in this directory.
step_script=$(type -P torchrun_script.sh || true)
for candidate in ./torchrun_script.sh jobs/torchrun_script.sh; do
  if [[ -z $step_script && -x $candidate ]]; then step_script=$PWD/${candidate#./}; fi
done
if [[ -z $step_script ]]; then
  echo "error: torchrun_script.sh is neither on the PATH nor in $PWD; write it there with: ddp-hpc render --step -o torchrun_script.sh" >&2
  exit 2
fi

echo "ddp-hpc: $num_nodes nodes, 2 ranks each, by torchrun"
# The launcher runs in the background: bash runs a trap only after the foreground command has ended.
"$step_script" python -m ddp_hpc.train &
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
