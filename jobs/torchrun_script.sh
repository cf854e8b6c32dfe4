#!/bin/bash
# Written by ddp-hpc 0.1.0 with: ddp-hpc render --step
#
# One agent of torchrun on this node; srun or mpiexec runs this script once on each node:
#
#   srun --nodes=2 torchrun_script.sh                         trains the default job on all GPUs of two nodes
#   srun --nodes=2 torchrun_script.sh --epochs 3              ... with options for ddp_hpc.train
#   srun --nodes=2 torchrun_script.sh -m my.module --lr 0.1   a module of your own
#   srun --nodes=2 torchrun_script.sh train.py --lr 0.1       a file of your own
#   mpiexec -n 2 --ppn 1 torchrun_script.sh                   the same under PBS
#
# DDP_HPC_RANKS_PER_NODE   ranks on each node; else its GPUs, else 1
# DDP_HPC_MIN_NODES        go on with so few nodes when others are lost; else all of them are needed
# DDP_HPC_MAX_RESTARTS     how often torchrun starts the ranks again (3)
# DDP_HPC_INIT_TIMEOUT_S   how long the nodes wait for each other (300)
# DDP_HPC_RDZV_BACKEND     c10d: torchrun's own rendezvous, which any user of the network can enter

set -euo pipefail

fail() {
  echo "error: torchrun_script.sh on ${HOSTNAME:-this node}: $1" >&2
  exit 2
}

# `srun --nodes=2` in an allocation of 4 tasks starts 4 tasks; one agent a node is enough.
if [[ ${SLURM_LOCALID:-0} != 0 ]]; then
  echo "torchrun_script.sh: task SLURM_LOCALID=$SLURM_LOCALID of ${HOSTNAME:-this node} has nothing to do, task 0 starts all ranks of the node" >&2
  exit 0
fi
# Under an MPI launcher no task may step aside like that: the others would wait for it in MPI_Init.
for name in PALS_LOCAL_SIZE MPI_LOCALNRANKS OMPI_COMM_WORLD_LOCAL_SIZE; do
  if [[ ${!name:-1} != 1 ]]; then
    [[ ${PALS_LOCAL_RANKID:-${MPI_LOCALRANKID:-${OMPI_COMM_WORLD_LOCAL_RANK:-0}}} == 0 ]] || exit 2
    fail "$name=${!name}: one agent of torchrun on a node starts all its ranks; run it once a node: mpiexec -n NODES --ppn 1"
  fi
done

# What to run: everything that is not a program is an option of ddp_hpc.train. torchrun brings Python itself.
case ${1:-} in
  python | python[0-9]* | */python | */python[0-9]*)
    shift
    if [[ ${1:-} == -u ]]; then shift; fi
    case ${1:-} in
      "") program=(-m ddp_hpc.train) ;;
      -m) program=("$@") ;;
      -*) fail "python $1 was asked for; torchrun takes a module or a file; write -m MODULE or FILE.py" ;;
      *) program=("$@") ;;
    esac
    ;;
  -m | *.py | */*) program=("$@") ;;
  *) program=(-m ddp_hpc.train "$@") ;;
esac
if [[ ${program[0]} == -m && -z ${program[1]:-} ]]; then
  fail "-m was given without a module; write -m MODULE"
fi

# The job script has done this already; a bare srun has not.
if [[ -z ${VIRTUAL_ENV:-}${CONDA_PREFIX:-} && -f .venv/bin/activate ]]; then
  set +u
  # shellcheck disable=SC1091
  source .venv/bin/activate
  set -u
fi
python=$(type -P python || type -P python3 || true)
if [[ -z $python ]]; then
  fail "no python on the PATH; load the module that has it, or make the environment .venv in $PWD"
fi

# A name is repeated in PBS_NODEFILE for each rank of its node.
num_nodes=${SLURM_STEP_NUM_NODES:-}
if [[ -z $num_nodes && -n ${PBS_NODEFILE:-} ]]; then
  num_nodes=$(($(sort -u "$PBS_NODEFILE" | wc -l)))
fi
num_nodes=${num_nodes:-1}

ranks_per_node=${DDP_HPC_RANKS_PER_NODE:-${SLURM_GPUS_ON_NODE:-}}
if [[ -z $ranks_per_node && -n ${CUDA_VISIBLE_DEVICES:-} ]]; then
  IFS=, read -r -a visible <<<"$CUDA_VISIBLE_DEVICES"
  ranks_per_node=${#visible[@]}
elif [[ -z $ranks_per_node ]] && type -P nvidia-smi >/dev/null; then
  # Without a driver nvidia-smi prints its complaint to stdout.
  ranks_per_node=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ' || true)
fi
if [[ ${ranks_per_node:-0} == 0 ]]; then ranks_per_node=1; fi
min_nodes=${DDP_HPC_MIN_NODES:-$num_nodes}
for name in num_nodes min_nodes ranks_per_node; do
  if ! [[ ${!name} =~ ^[1-9][0-9]{0,8}$ ]]; then
    fail "$name is '${!name}'; a whole number from 1 on is needed; check DDP_HPC_RANKS_PER_NODE and DDP_HPC_MIN_NODES"
  fi
done
if ((min_nodes > num_nodes)); then
  fail "DDP_HPC_MIN_NODES=$min_nodes nodes are needed and there are $num_nodes; ask for more, or set it lower"
fi
if ((min_nodes < num_nodes)); then nodes=$min_nodes:$num_nodes; else nodes=$num_nodes; fi

# The nodes agree on one address: `HOST PORT NODE_RANK LOCAL_ADDR KEY_FILE`. The helper stays until this script,
# its parent, is gone: it serves or holds the port and removes the key. It is not killed: under Hydra, a process
# of an MPI job that ends without MPI_Finalize takes the job with it.
timeout_s=${DDP_HPC_INIT_TIMEOUT_S:-300}
backend=${DDP_HPC_RDZV_BACKEND:-ddp-hpc}
if [[ $backend != ddp-hpc && $backend != c10d ]]; then
  fail "DDP_HPC_RDZV_BACKEND is '$backend'; ddp-hpc or c10d is needed; leave it out"
fi
exec {answer}< <(exec "$python" -m ddp_hpc.rendezvous.torchrun_endpoint --nodes "$num_nodes" --rendezvous "$backend" --timeout-s "$timeout_s" </dev/null)
if ! read -r host port node_rank local_addr DDP_HPC_KEY_FILE <&"$answer"; then
  exit 1 # the helper has reported why
fi
exec {answer}<&-
# The file, on this node, holds what only this job knows: agents and ranks show it to each other.
export DDP_HPC_KEY_FILE
conf="join_timeout=$timeout_s"
if [[ $backend == c10d ]]; then conf+=",is_host=$((node_rank == 0))"; fi

# torch 2.13: workers share the agent's store, which keeps the addresses of the ranks before a restart, and
# restarted gloo ranks are then refused until no restart is left. Their own store each time avoids that.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

# Slurm signals all processes of a step. torchrun would die of these; the ranks have handlers of their own.
trap '' USR1 USR2
# In the background, since bash runs a trap only after its foreground command.
"$python" -m ddp_hpc.torchrun \
  --nnodes="$nodes" \
  --nproc-per-node="$ranks_per_node" \
  --rdzv-backend="$backend" \
  --rdzv-id="${SLURM_JOB_ID:-${PBS_JOBID:-ddp-hpc}}${SLURM_STEP_ID:+.$SLURM_STEP_ID}" \
  --rdzv-endpoint="$host:$port" \
  --rdzv-conf="$conf" \
  --local-addr="$local_addr" \
  --max-restarts="${DDP_HPC_MAX_RESTARTS:-3}" \
  "${program[@]}" &
agent=$!
stopped=false
trap 'stopped=true; kill -TERM "$agent" 2>/dev/null || true' TERM INT
code=0
wait "$agent" || code=$?
# A trap cuts the wait short; the agent's own exit code comes with the next one.
while $stopped; do
  stopped=false
  code=0
  wait "$agent" || code=$?
done
exit "$code"
