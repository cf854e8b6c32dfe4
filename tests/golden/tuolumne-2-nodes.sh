#!/bin/bash
#flux: --job-name=ddp
#flux: --nodes=2
#flux: --exclusive
#flux: --time-limit=1800s
#flux: --queue=pdebug
#flux: --output=ddp-{{id}}.out
# Written by ddp-hpc 0.1.0 with: ddp-hpc render --profile tuolumne --nodes 2
# Tuolumne (LLNL) requires an account, but this script does not set one; submit it with: flux batch --setattr=bank=PROJECT SCRIPT

set -euo pipefail
: "${FLUX_URI:?is not set; submit this script with flux batch}"

# A virtual environment beside the job, unless one is active already.
if [[ -z ${VIRTUAL_ENV:-}${CONDA_PREFIX:-} && -f .venv/bin/activate ]]; then
  set +u
  # shellcheck disable=SC1091
  source .venv/bin/activate
  set -u
fi

num_nodes=$(flux resource list -s up -no '{nnodes}')
num_ranks=$((num_nodes * 4))

# What the ranks read.
export OMP_NUM_THREADS=1
export DDP_HPC_PROFILE=tuolumne
# Compiled kernels stay on the node: Triton's default is the home directory, which all nodes share.
export TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-/tmp/triton-$UID}"
export TORCHINDUCTOR_CACHE_DIR="${TORCHINDUCTOR_CACHE_DIR:-/tmp/torchinductor-$UID}"
export DDP_HPC_RUN_DIR="$PWD"/runs/ddp
export DDP_HPC_MAX_ATTEMPTS=20
# Compiled kernels are run: a folder that another user has made under that name is not taken.
for name in TRITON_CACHE_DIR TORCHINDUCTOR_CACHE_DIR; do
  (umask 077 && mkdir -p -- "${!name}") 2>/dev/null || true
  if [[ ! -O ${!name} || -L ${!name} ]]; then printf -v "$name" %s "$(mktemp -d)"; fi
done
# When the allocation ends, in unix seconds: SECONDS counts from the start of this shell.
DDP_HPC_DEADLINE=$(($(date +%s) - SECONDS + 1800))
export DDP_HPC_DEADLINE

# The script runs in a Flux instance of its own, which knows its id in the one around it.
job_id=$(flux getattr jobid 2>/dev/null || echo $$)
# How far the run is, in the trainer's words, and which attempt this one is.
mkdir -p "$DDP_HPC_RUN_DIR"
# These files decide what this job does and what is submitted in its user's name: nobody else may write them.
check_files() {
  local foreign
  foreign=$(find "$DDP_HPC_RUN_DIR/" -maxdepth 1 \
    \( -name state -o -name attempts -o -name cancelled -o -name refused -o -name job.sh -o -name job.sh.new \) \
    \( ! -type f -o ! -uid "$EUID" -o -perm /022 \) -print -quit)
  if [[ -n $foreign ]]; then
    echo "error: $foreign is another user's, or others may write it; a file that you alone can write is needed; look at it, then remove it or chmod go-w" >&2
    exit 2
  fi
}
check_files
read_state() {
  state='' step=0 reason=''
  written=$(stat -c '%i %y' "$DDP_HPC_RUN_DIR/state" 2>/dev/null || true)
  if [[ -n $written ]]; then read -r state step reason <"$DDP_HPC_RUN_DIR/state" || true; fi
  if ! [[ $state =~ ^(running|again|done|failed)$ && $step =~ ^(0|[1-9][0-9]{0,14})$ ]]; then state='' step=0; fi
}
read_state
first_step=$step attempt=${DDP_HPC_ATTEMPT:-1} requeued=false last_step=0
if [[ -s $DDP_HPC_RUN_DIR/attempts ]]; then
  last_line=$(tail -n 1 "$DDP_HPC_RUN_DIR/attempts")
  pattern='^([1-9][0-9]{0,5}) ([^ ]+) (0|[1-9][0-9]{0,14}) [0-9]+$'
  if ! [[ $last_line =~ $pattern ]]; then
    echo "error: $DDP_HPC_RUN_DIR/attempts ends in '$last_line'; ATTEMPT JOBID STEP UNIX_S is needed; remove the file" >&2
    exit 1
  fi
  last_step=${BASH_REMATCH[3]}
  # Nothing else tells a requeued job of PBS from its first run.
  if [[ ${BASH_REMATCH[2]} == "$job_id" ]]; then requeued=true attempt=$((BASH_REMATCH[1] + 1)); fi
fi
if ! [[ $attempt =~ ^[1-9][0-9]{0,6}$ ]]; then
  echo "error: DDP_HPC_ATTEMPT is '$attempt'; a whole number from 1 on is needed; leave it out" >&2
  exit 2
fi
if ((attempt > 1)); then
  if [[ $state == "done" ]]; then
    echo "ddp-hpc: all $step steps are trained; attempt $attempt has nothing to do"
    exit 0
  fi
  # A requeue is the scheduler's will or a person's, and may follow a failure that a lost node caused.
  if [[ $state == failed ]] && ! $requeued; then
    echo "error: the attempt before this one failed${reason:+: $reason}; mend that, then submit the script again" >&2
    exit 1
  elif ((step <= last_step)) && ! $requeued; then
    echo "error: the attempt before this one made no step of progress and the run is still at step $step; look for the reason in its log, then submit the script again" >&2
    exit 1
  elif ((attempt > DDP_HPC_MAX_ATTEMPTS)); then
    echo "ddp-hpc: the run is at step $step after $DDP_HPC_MAX_ATTEMPTS attempts, the most it may have (--max-attempts); to go on, submit the script again"
    exit 75
  fi
  echo "ddp-hpc: attempt $attempt of at most $DDP_HPC_MAX_ATTEMPTS, from step $step"
fi
rm -f -- "$DDP_HPC_RUN_DIR/cancelled" "$DDP_HPC_RUN_DIR/refused" # of earlier attempts
# The trainer writes this into `refused` where another one's ranks still use the run's folder.
export DDP_HPC_THIS_ATTEMPT="$attempt $job_id"
(
  umask go-w
  echo "$attempt $job_id $first_step $(date +%s)" >>"$DDP_HPC_RUN_DIR/attempts"
  # A folder's default access list goes before the umask.
  chmod go-w -- "$DDP_HPC_RUN_DIR/attempts"
  # The scheduler's copy of this script is gone when the job is.
  if cp -- "$0" "$DDP_HPC_RUN_DIR/job.sh.new"; then
    chmod go-w -- "$DDP_HPC_RUN_DIR/job.sh.new"
    mv -f -- "$DDP_HPC_RUN_DIR/job.sh.new" "$DDP_HPC_RUN_DIR/job.sh"
  fi
)

echo "ddp-hpc: job $job_id, $num_nodes nodes, $num_ranks ranks, by flux"
# In the background, since bash runs a trap only after its foreground command.
flux run --exclusive --nodes="$num_nodes" --tasks-per-node=4 \
  python -m ddp_hpc.train &
launcher=$!
hand_on=(kill -TERM "$launcher")
warn=("${hand_on[@]}") # not every launcher hands USR1 on to the ranks
stopped=false
stopped_s=0
# Never CONT: Slurm sends it right after other signals, and bash would lose those.
trap 'stopped=true stopped_s=$(date +%s); "${hand_on[@]}" 2>/dev/null || true' TERM INT
trap 'stopped=true; "${warn[@]}" 2>/dev/null || true' USR1
code=0
wait "$launcher" || code=$?
# A trap cuts the wait short; the launcher's own exit code comes with the next one.
while $stopped; do
  stopped=false
  code=0
  wait "$launcher" || code=$?
done

# What comes next. Launchers bend exit codes, so the trainer's word counts where it spoke in this attempt.
trap '' TERM INT USR1
before=$written
check_files
read_state
# While this node was cut off the scheduler may have started the job anew elsewhere: the run is that attempt's.
if [[ $(tail -n 1 "$DDP_HPC_RUN_DIR/attempts") != "$attempt $job_id "* ]]; then exit "$code"; fi
# A refusal, as by the lock of another attempt whose ranks still live, is none: the state is that other's word.
if ((code == 2)) && [[ $written == "$before" || $state != failed ]] || [[ $(cat "$DDP_HPC_RUN_DIR/refused" 2>/dev/null) == "$attempt $job_id" ]]; then
  sed -i '$ d' "$DDP_HPC_RUN_DIR/attempts"
  echo "ddp-hpc: this start was refused and does not count as an attempt; nothing is submitted; the run is at step $step"
  exit 2
fi
if [[ $written == "$before" || -z $state ]]; then exit "$code"; fi
if [[ $state == "done" ]]; then exit 0; fi
if [[ $state == running ]] && ((code && step > first_step)); then
  # A rank or a node was lost without a word. What was saved before makes another attempt worth it.
  state=again reason="the launcher ended with $code and no rank could say why"
fi
if [[ $state != again ]]; then exit "$((code ? code : 1))"; fi
stopped_at="stopped at step $step${reason:+: $reason}"
# In its last half minute the end of the walltime and a cancellation are the same signal.
was_cancelled() {
  grep -qxF -- "${job_id%%.*}" "$DDP_HPC_RUN_DIR/cancelled" 2>/dev/null
}
printf -v by_hand 'cd %q && flux batch %q' "$PWD" "$DDP_HPC_RUN_DIR/job.sh"
# A signal well before the end is somebody's will, or the scheduler is going to requeue the job by itself.
if ((stopped_s && stopped_s < DDP_HPC_DEADLINE - 30)); then
  echo "ddp-hpc: $stopped_at; that was a signal before the end of the walltime, so nothing is submitted; to go on: $by_hand"
elif was_cancelled; then
  echo "ddp-hpc: $stopped_at; the job was cancelled, so nothing is submitted; to go on: $by_hand"
elif ((step <= first_step)); then
  echo "error: attempt $attempt made no step of progress: it began at step $first_step and $stopped_at; give it more time, then: $by_hand" >&2
  exit 1
elif ((attempt >= DDP_HPC_MAX_ATTEMPTS)); then
  echo "ddp-hpc: $stopped_at; attempt $attempt was the last (--max-attempts); to go on: $by_hand"
else
  echo "ddp-hpc: $stopped_at; this script submits no successor under Flux; to go on: $by_hand"
fi
exit 75
