#!/bin/bash
#flux: --job-name=ddp
#flux: --nodes=2
#flux: --exclusive
#flux: --time-limit=1800s
#flux: --queue=pdebug
#flux: --output=ddp-{{id}}.out
# Written by ddp-hpc 0.2.0 with: ddp-hpc render --profile tuolumne --nodes 2
# Tuolumne (LLNL) requires an account, but this script does not set one; submit it with: flux batch --setattr=bank=PROJECT SCRIPT

set -euo pipefail
: "${FLUX_URI:?is not set; submit this script with flux batch}"

# Activate the virtual environment .venv of this directory, unless another environment is already active.
if [[ -z ${VIRTUAL_ENV:-}${CONDA_PREFIX:-} && -f .venv/bin/activate ]]; then
  set +u
  # shellcheck disable=SC1091
  source .venv/bin/activate
  set -u
fi

num_nodes=$(flux resource list -s up -no '{nnodes}')
num_ranks=$((num_nodes * 4))

# Environment variables for the ranks.
export OMP_NUM_THREADS=1
export DDP_HPC_PROFILE=tuolumne
# Compiled kernels stay on the node: Triton's default is the home directory, which all nodes share.
export TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-/tmp/triton-$UID}"
export TORCHINDUCTOR_CACHE_DIR="${TORCHINDUCTOR_CACHE_DIR:-/tmp/torchinductor-$UID}"
export DDP_HPC_RUN_DIR="$PWD"/runs/ddp
export DDP_HPC_MAX_ATTEMPTS=20
# Ranks execute the compiled kernels in this directory, so one that another user owns is not used.
for name in TRITON_CACHE_DIR TORCHINDUCTOR_CACHE_DIR; do
  (umask 077 && mkdir -p -- "${!name}") 2>/dev/null || true
  if [[ ! -O ${!name} || -L ${!name} ]]; then printf -v "$name" %s "$(mktemp -d)"; fi
done
# The end of the allocation in Unix seconds. SECONDS is the time since this shell started.
DDP_HPC_DEADLINE=$(($(date +%s) - SECONDS + 1800))
export DDP_HPC_DEADLINE

# The script runs in its own Flux instance. The attribute jobid is the job's ID in the enclosing instance.
job_id=$(flux getattr jobid 2>/dev/null || echo $$)
# Read the progress of the run from its run directory, and determine the number of this attempt.
mkdir -p "$DDP_HPC_RUN_DIR"
# These files control this job and the jobs that it submits, so nobody but you must be able to write to them.
check_files() {
  local unsafe
  unsafe=$(find "$DDP_HPC_RUN_DIR/" -maxdepth 1 \
    \( -name state -o -name attempts -o -name cancelled -o -name refused -o -name job.sh -o -name job.sh.new \) \
    \( ! -type f -o ! -uid "$EUID" -o -perm /022 \) -print -quit)
  if [[ -n $unsafe ]]; then
    echo "error: $unsafe is not a regular file, belongs to another user, or can be written by other users; a file that only you can write is needed; inspect it, then remove it or run chmod go-w" >&2
    exit 2
  fi
}
check_files
# Sets `state`, `step` and `reason` to what the trainer wrote last, and `state_stamp` to the time of that.
read_state() {
  state='' step=0 reason=''
  state_stamp=$(stat -c '%i %y' "$DDP_HPC_RUN_DIR/state" 2>/dev/null || true)
  if [[ -n $state_stamp ]]; then read -r state step reason <"$DDP_HPC_RUN_DIR/state" || true; fi
  # Version 0.1 of ddp-hpc wrote `again` instead of `requeue`.
  if [[ $state == again ]]; then state=requeue; fi
  if ! [[ $state =~ ^(running|requeue|done|failed)$ && $step =~ ^(0|[1-9][0-9]{0,14})$ ]]; then state='' step=0; fi
}
read_state
first_step=$step attempt=${DDP_HPC_ATTEMPT:-1} requeued=false last_step=0
if [[ -s $DDP_HPC_RUN_DIR/attempts ]]; then
  last_line=$(tail -n 1 "$DDP_HPC_RUN_DIR/attempts")
  pattern='^([1-9][0-9]{0,5}) ([^ ]+) (0|[1-9][0-9]{0,14}) [0-9]+$'
  if ! [[ $last_line =~ $pattern ]]; then
    echo "error: the last line of $DDP_HPC_RUN_DIR/attempts is '$last_line'; ATTEMPT JOBID STEP UNIX_S is needed; remove the file" >&2
    exit 1
  fi
  last_step=${BASH_REMATCH[3]}
  # A job whose ID is already in the file was requeued. PBS does not report a requeue in any other way.
  if [[ ${BASH_REMATCH[2]} == "$job_id" ]]; then requeued=true attempt=$((BASH_REMATCH[1] + 1)); fi
fi
if ! [[ $attempt =~ ^[1-9][0-9]{0,6}$ ]]; then
  echo "error: DDP_HPC_ATTEMPT is '$attempt'; a positive integer is needed; unset the variable" >&2
  exit 2
fi
if ((attempt > 1)); then
  if [[ $state == "done" ]]; then
    echo "ddp-hpc: all $step steps are trained; attempt $attempt has nothing to do"
    exit 0
  fi
  # A requeued job runs even after a failure: the requeue was requested, and a lost node can have caused the failure.
  if [[ $state == failed ]] && ! $requeued; then
    echo "error: the previous attempt failed${reason:+: $reason}; fix the cause, then submit the script again" >&2
    exit 1
  elif ((step <= last_step)) && ! $requeued; then
    echo "error: the previous attempt made no progress, and the run is still at step $step; look for the reason in its log, then submit the script again" >&2
    exit 1
  elif ((attempt > DDP_HPC_MAX_ATTEMPTS)); then
    echo "ddp-hpc: the run is at step $step after $DDP_HPC_MAX_ATTEMPTS attempts, the maximum (--max-attempts); to resume it, submit the script again"
    exit 75
  fi
  echo "ddp-hpc: attempt $attempt of at most $DDP_HPC_MAX_ATTEMPTS, from step $step"
fi
# These two files concern earlier attempts.
rm -f -- "$DDP_HPC_RUN_DIR/cancelled" "$DDP_HPC_RUN_DIR/refused"
# The trainer copies this line to `refused` if ranks of another attempt still use the run directory.
export DDP_HPC_THIS_ATTEMPT="$attempt $job_id"
# The trainer may write `requeue`; scripts of version 0.1, which do not set this variable, need `again`.
export DDP_HPC_STATE_FORMAT=2
(
  umask go-w
  echo "$attempt $job_id $first_step $(date +%s)" >>"$DDP_HPC_RUN_DIR/attempts"
  # A default ACL of the directory overrides the umask.
  chmod go-w -- "$DDP_HPC_RUN_DIR/attempts"
  # The next attempt needs a copy of this script: the scheduler deletes its own copy when the job ends.
  if cp -- "$0" "$DDP_HPC_RUN_DIR/job.sh.new"; then
    chmod go-w -- "$DDP_HPC_RUN_DIR/job.sh.new"
    mv -f -- "$DDP_HPC_RUN_DIR/job.sh.new" "$DDP_HPC_RUN_DIR/job.sh"
  fi
)

echo "ddp-hpc: job $job_id, $num_nodes nodes, $num_ranks ranks, by flux"
# The launcher runs in the background: bash runs a trap only after the foreground command has ended.
flux run --exclusive --nodes="$num_nodes" --tasks-per-node=4 \
  python -m ddp_hpc.train &
launcher=$!
forward_term=(kill -TERM "$launcher")
forward_usr1=("${forward_term[@]}") # TERM, because not every launcher forwards USR1 to the ranks
stopped=false
stopped_s=0
# CONT is not trapped: Slurm sends it right after other signals, and bash would lose those.
trap 'stopped=true stopped_s=$(date +%s); "${forward_term[@]}" 2>/dev/null || true' TERM INT
trap 'stopped=true; "${forward_usr1[@]}" 2>/dev/null || true' USR1
code=0
wait "$launcher" || code=$?
# A signal interrupts `wait`. The next `wait` returns the exit code of the launcher.
while $stopped; do
  stopped=false
  code=0
  wait "$launcher" || code=$?
done

# Decide whether another job resumes the run. Launchers change exit codes, so the state from the trainer has priority.
trap '' TERM INT USR1
initial_stamp=$state_stamp
check_files
read_state
# If this node was disconnected, the scheduler can have restarted the job elsewhere. That attempt now owns the run.
if [[ $(tail -n 1 "$DDP_HPC_RUN_DIR/attempts") != "$attempt $job_id "* ]]; then exit "$code"; fi
# A refused start is not an attempt. For example, live ranks of another attempt hold the lock; the state is theirs.
if ((code == 2)) && [[ $state_stamp == "$initial_stamp" || $state != failed ]] || [[ $(cat "$DDP_HPC_RUN_DIR/refused" 2>/dev/null) == "$attempt $job_id" ]]; then
  sed -i '$ d' "$DDP_HPC_RUN_DIR/attempts"
  echo "ddp-hpc: this start was refused and does not count as an attempt; nothing is submitted; the run is at step $step"
  exit 2
fi
if [[ $state_stamp == "$initial_stamp" || -z $state ]]; then exit "$code"; fi
if [[ $state == "done" ]]; then exit 0; fi
if [[ $state == running ]] && ((code && step > first_step)); then
  # A rank or a node was lost before it could report a reason. This attempt saved a snapshot, so another can resume.
  state=requeue reason="the launcher exited with code $code and no rank reported a reason"
fi
if [[ $state != requeue ]]; then exit "$((code ? code : 1))"; fi
stopped_at="stopped at step $step${reason:+: $reason}"
# In the last half minute of the walltime, a cancelled job receives the same signal as a job that reaches its limit.
was_cancelled() {
  grep -qxF -- "${job_id%%.*}" "$DDP_HPC_RUN_DIR/cancelled" 2>/dev/null
}
printf -v resume_command 'cd %q && flux batch %q' "$PWD" "$DDP_HPC_RUN_DIR/job.sh"
# An earlier signal comes from a user, or from a preemption, after which the scheduler itself requeues the job.
if ((stopped_s && stopped_s < DDP_HPC_DEADLINE - 30)); then
  echo "ddp-hpc: $stopped_at; a signal arrived before the end of the walltime, so nothing is submitted; to resume: $resume_command"
elif was_cancelled; then
  echo "ddp-hpc: $stopped_at; the job was cancelled, so nothing is submitted; to resume: $resume_command"
elif ((step <= first_step)); then
  echo "error: attempt $attempt made no progress: it began at step $first_step and $stopped_at; increase its walltime, then resume: $resume_command" >&2
  exit 1
elif ((attempt >= DDP_HPC_MAX_ATTEMPTS)); then
  echo "ddp-hpc: $stopped_at; attempt $attempt was the last (--max-attempts); to resume: $resume_command"
else
  echo "ddp-hpc: $stopped_at; this script submits no successor under Flux; to resume: $resume_command"
fi
exit 75
