#!/bin/bash
# Written by ddp-hpc 0.1.0 with: ddp-hpc render --profile local --ranks-per-node 2 --walltime 00:10:00 --launcher torchrun

set -euo pipefail

# A virtual environment beside the job, unless one is active already.
if [[ -z ${VIRTUAL_ENV:-}${CONDA_PREFIX:-} && -f .venv/bin/activate ]]; then
  set +u
  # shellcheck disable=SC1091
  source .venv/bin/activate
  set -u
fi

num_nodes=1

# What the ranks read.
export DDP_HPC_RANKS_PER_NODE=2
export DDP_HPC_PROFILE=local
export DDP_HPC_RUN_DIR="$PWD"/runs/ddp
# When to stop, in unix seconds: SECONDS counts from the start of this shell.
DDP_HPC_DEADLINE=$(($(date +%s) - SECONDS + 600))
export DDP_HPC_DEADLINE

# The script that starts one agent of torchrun on each node: installed with ddp-hpc, or beside the job.
step_script=$(type -P torchrun_script.sh || true)
for candidate in ./torchrun_script.sh jobs/torchrun_script.sh; do
  if [[ -z $step_script && -x $candidate ]]; then step_script=$PWD/${candidate#./}; fi
done
if [[ -z $step_script ]]; then
  echo "error: torchrun_script.sh is neither on the PATH nor in $PWD; write it there with: ddp-hpc render --step -o torchrun_script.sh" >&2
  exit 2
fi

echo "ddp-hpc: $num_nodes nodes, 2 ranks each, by torchrun"
# In the background, since bash runs a trap only after its foreground command.
"$step_script" python -m ddp_hpc.train &
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
