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
# DDP_HPC_MIN_NODES        minimum number of nodes with which to continue after others are lost (default: all nodes)
# DDP_HPC_MAX_RESTARTS     maximum number of times that torchrun restarts the ranks (default: 3)
# DDP_HPC_INIT_TIMEOUT_S   time in seconds that the nodes wait for each other (default: 300)
# DDP_HPC_RDZV_BACKEND     ddp-hpc (default), or c10d for torchrun's own rendezvous, which any user of the network
#                          can join

set -euo pipefail

fail() {
  echo "error: torchrun_script.sh on ${HOSTNAME:-this node}: $1" >&2
  exit 2
}

# `srun --nodes=2` in an allocation of 4 tasks starts 4 tasks, but only one agent per node is needed.
if [[ ${SLURM_LOCALID:-0} != 0 ]]; then
  echo "torchrun_script.sh: task SLURM_LOCALID=$SLURM_LOCALID on ${HOSTNAME:-this node} has nothing to do: task 0 starts all ranks of the node" >&2
  exit 0
fi
# Under an MPI launcher a surplus task cannot just exit: the other tasks would wait for it in MPI_Init.
for name in PALS_LOCAL_SIZE MPI_LOCALNRANKS OMPI_COMM_WORLD_LOCAL_SIZE; do
  if [[ ${!name:-1} != 1 ]]; then
    [[ ${PALS_LOCAL_RANKID:-${MPI_LOCALRANKID:-${OMPI_COMM_WORLD_LOCAL_RANK:-0}}} == 0 ]] || exit 2
    fail "$name=${!name}: one torchrun agent starts all ranks of a node; run this script once per node: mpiexec -n NODES --ppn 1"
  fi
done

# Determine the program. Arguments that are not a program are options of ddp_hpc.train. torchrun starts Python itself.
case ${1:-} in
  python | python[0-9]* | */python | */python[0-9]*)
    shift
    if [[ ${1:-} == -u ]]; then shift; fi
    case ${1:-} in
      "") program=(-m ddp_hpc.train) ;;
      -m) program=("$@") ;;
      -*) fail "python $1 was given; torchrun needs a module or a file; write -m MODULE or FILE.py" ;;
      *) program=("$@") ;;
    esac
    ;;
  -m | *.py | */*) program=("$@") ;;
  *) program=(-m ddp_hpc.train "$@") ;;
esac
if [[ ${program[0]} == -m && -z ${program[1]:-} ]]; then
  fail "-m was given without a module; write -m MODULE"
fi

# Activate the virtual environment as the job script does, in case that srun was started without one.
if [[ -z ${VIRTUAL_ENV:-} && ${CONDA_DEFAULT_ENV:-base} == base && -f .venv/bin/activate ]]; then
  set +u
  # shellcheck disable=SC1091
  source .venv/bin/activate
  set -u
fi
python=$(type -P python || type -P python3 || true)
if [[ -z $python ]]; then
  fail "python was not found on the PATH; load the module that provides it, or create the virtual environment .venv in $PWD"
fi

# PBS_NODEFILE can contain the name of a node several times, once per rank.
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
  # Without a driver nvidia-smi prints its error message to stdout.
  ranks_per_node=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ' || true)
fi
if [[ ${ranks_per_node:-0} == 0 ]]; then ranks_per_node=1; fi
min_nodes=${DDP_HPC_MIN_NODES:-$num_nodes}
for name in num_nodes min_nodes ranks_per_node; do
  if ! [[ ${!name} =~ ^[1-9][0-9]{0,8}$ ]]; then
    fail "$name is '${!name}'; a positive integer is needed; check DDP_HPC_RANKS_PER_NODE and DDP_HPC_MIN_NODES"
  fi
done
if ((min_nodes > num_nodes)); then
  fail "DDP_HPC_MIN_NODES is $min_nodes, but there are only $num_nodes nodes; request more nodes, or reduce DDP_HPC_MIN_NODES"
fi
if ((min_nodes < num_nodes)); then nodes=$min_nodes:$num_nodes; else nodes=$num_nodes; fi

# Agree with the other nodes on the address of the rendezvous. torchrun_endpoint prints one line, `HOST PORT NODE_RANK
# LOCAL_ADDR KEY_FILE`, and runs until this script, its parent, has ended: it serves or reserves the port and then
# removes the key file. It must not be killed: under Hydra, a process that ends without MPI_Finalize ends the MPI job.
timeout_s=${DDP_HPC_INIT_TIMEOUT_S:-300}
backend=${DDP_HPC_RDZV_BACKEND:-ddp-hpc}
if [[ $backend != ddp-hpc && $backend != c10d ]]; then
  fail "DDP_HPC_RDZV_BACKEND is '$backend'; ddp-hpc or c10d is needed; unset it for the default"
fi
exec {answer}< <(exec "$python" -m ddp_hpc.rendezvous.torchrun_endpoint --nodes "$num_nodes" --rendezvous "$backend" --timeout-s "$timeout_s" </dev/null)
if ! read -r host port node_rank local_addr DDP_HPC_KEY_FILE <&"$answer"; then
  exit 1 # torchrun_endpoint has reported the reason
fi
exec {answer}<&-
# This file, which is on this node, contains the secret key with which agents and ranks authenticate each other.
export DDP_HPC_KEY_FILE
conf="join_timeout=$timeout_s"
if [[ $backend == c10d ]]; then conf+=",is_host=$((node_rank == 0))"; fi

# Let the ranks create a new store after each restart. By default they share the agent's store (torch 2.13), which
# keeps the addresses of the ranks before the restart, so that gloo ranks fail to connect until no restart is left.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

# Slurm signals all processes of a step. These two signals would terminate torchrun; the ranks handle them.
trap '' USR1 USR2
# The agent runs in the background: bash runs a trap only after the foreground command has ended.
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
# A signal interrupts `wait`. The next `wait` returns the exit code of the agent.
while $stopped; do
  stopped=false
  code=0
  wait "$agent" || code=$?
done
exit "$code"
