"""The Slurm job of this process: its time limit, why Slurm ends it, and its requeue."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from socket import gethostname

from ddp_hpc.base.errors import DdpHpcError, RequestError
from ddp_hpc.base.process_control import is_running
from ddp_hpc.schedulers import run_command as commands
from ddp_hpc.schedulers.running_job import (
    Queued,
    RunningJob,
    StopCause,
    Successor,
    with_count,
    without_job,
)
from ddp_hpc.schedulers.slurm.query_and_cancel import fields_of, job_id_of

# A directive that chooses the QOS. Some sites derive the partition from the QOS, so a resubmitted job with
# this directive must not name a partition.
_QOS = re.compile(r"^#SBATCH\s+(?:--qos\b|-q\b)", re.MULTILINE)

_ANSWER_S = 5.0
_ASK_LIMIT_S = 10.0
# Seen with Slurm 22.05: "Invalid generic resource (gres) specification". A smaller number is of no use, since
# Slurm can give each node another number of GPUs.
TOTAL_OF_GPUS = (
    "--gpus is the number of GPUs of the whole job, which srun would request on the nodes of the ranks "
    "alone. Use --gpus-per-node."
)

# The srun that has created a step. Slurm itself creates the steps `batch` and `extern`.
_STEP = re.compile(r"^StepId=(\S+\.\d+) .*SrunHost:Pid=([^:\s]+):(\d+)", re.MULTILINE)


class SlurmJob(RunningJob):
    """The Slurm job of this process."""

    watched_ports = (9, 6818)  # the latter is that of slurmd, which no firewall can block
    work_dir_variable = "SLURM_SUBMIT_DIR"

    def __init__(self, job_id: str, environ: Mapping[str, str]) -> None:
        super().__init__(job_id, environ)
        # On SIGTERM, srun would kill all ranks immediately. scancel sends the signal to the ranks instead.
        if self.is_job and shutil.which("scancel"):
            self.forwards_term = f"scancel --signal={{signal}} {job_id}"

    def stop_cause(self, limit_s: float) -> StopCause:
        # Seen with Slurm 22.05 and 26.05 while the batch script handled SIGTERM: the reason is TimeLimit at
        # the time limit, Restarts is incremented for a requeue, and after scancel the job is COMPLETING.
        try:
            answer = commands.run(("scontrol", "--oneliner", "show", "job", self.job_id), limit_s)
        except commands.NoAnswerError:
            return "unknown"
        job = fields_of(answer.out)
        if job.get("Reason") == "TimeLimit":
            return "walltime"
        restarts = self.environ.get("SLURM_RESTART_COUNT", "0")
        if job.get("Restarts", restarts) != restarts:
            return "requeued"
        if job.get("PreemptTime", "None") != "None":
            return "preempted"
        return "cancelled" if job.get("JobState", "") in ("COMPLETING", "CANCELLED") else "unknown"

    def node_names(self) -> str:
        return self.environ.get("SLURM_JOB_NODELIST", "")

    def scheduler_answers(self) -> bool:
        with suppress(commands.NoAnswerError):
            return commands.run(("scontrol", "show", "job", self.job_id), _ANSWER_S).code == 0
        return False

    def on_nodes(
        self, argv: Sequence[str], names: Sequence[str], num_nodes: int, directory: Path
    ) -> tuple[list[str], dict[str, str]]:
        launcher = argv[0].rpartition("/")[2]
        if launcher != "srun":
            raise RequestError(
                f"--spare-nodes or --min-nodes was given, but the launch line begins with {launcher}; it "
                "must begin with srun, since only srun can leave out nodes of a job"
            )
        if self.environ.get("SLURM_GPUS"):
            raise RequestError(f"--spare-nodes or --min-nodes was given, but {TOTAL_OF_GPUS}")
        for option in ("--nodes", "--ntasks"):
            argv = with_count(argv, option, num_nodes, len(names))
        # A step on a node that has died keeps its resources on all nodes until Slurm has noticed the loss.
        return [argv[0], f"--nodelist={','.join(names)}", "--overlap", *argv[1:]], {}

    def unhealthy_nodes(self, names: Sequence[str]) -> dict[str, str]:
        # LBNL NHC drains a bad node with a reason that begins with "NHC:" (its helper node-mark-offline). Any
        # user can read the reason.
        ask = ("sinfo", "--noheader", "--Node", f"--nodes={','.join(names)}", "--format=%N %E")
        with suppress(commands.NoAnswerError):
            lines = (line.partition(" ") for line in commands.run(ask, _ASK_LIMIT_S).out.splitlines())
            return {name: reason.strip() for name, _, reason in lines if reason.startswith("NHC:")}
        return {}

    def run_beside_ranks(self, name: str, argv: Sequence[str]) -> subprocess.Popen[bytes] | None:
        words = ["srun", f"--jobid={self.environ['SLURM_JOB_ID']}", "--overlap", "--nodes=1", "--ntasks=1"]
        words += [f"--nodelist={name}", "--gres=none", "--mpi=none", *argv]
        # The options of the job are in variables that srun reads. Slurm 22.05 rejects a step of one task with
        # those of sbatch --gpus-per-node or --ntasks-per-gpu.
        environ = without_job(self.environ, ("SLURM", "SRUN_"), keep="SLURM_CONF")
        null = subprocess.DEVNULL
        # The supervisor blocks signals, which srun would inherit.
        unblock = partial(signal.pthread_sigmask, signal.SIG_SETMASK, ())
        try:
            return subprocess.Popen(
                words, env=environ, stdin=null, stdout=null, stderr=null, preexec_fn=unblock
            )
        except OSError:  # the ranks need srun, too, so the next message is about it
            return None

    def end_ranks(self, limit_s: float) -> bool:
        # Seen with Slurm 22.05: if both processes of srun are killed, its ranks run on, and the next srun
        # waits for their CPUs. `scancel --signal=KILL` with only the job's ID would end the job, and other
        # steps can be those of a user who looks at the job.
        ask = ("scontrol", "--oneliner", "show", "step", self.job_id)
        end_s = time.monotonic() + limit_s
        with suppress(commands.NoAnswerError):
            while (left_s := end_s - time.monotonic()) > 0:
                answer = commands.run(ask, left_s)
                steps = [step for step, host, pid in _STEP.findall(answer.out) if _is_orphan(host, int(pid))]
                if not steps and (answer.code == 0 or "not found" in answer.err):
                    return True
                if steps:
                    commands.run(("scancel", "--signal=KILL", *steps), left_s)
                time.sleep(0.5)
        return False

    def resubmit(self, request: Successor) -> Queued:
        """Requeues the job. If scontrol is missing or not permitted, a new job is submitted."""
        if shutil.which("scontrol"):
            # If scontrol does not answer, the job may have been requeued, and a new job would run at the same
            # time.
            requeue = ("scontrol", "requeue", self.job_id)
            answer = commands.submit_until(
                requeue,
                request.until_s,
                request.on_unreachable,
                may_repeat=True,
            )
            if answer.code == 0 or "pending" in answer.out + answer.err:
                # A busy controller must not delay the requeue. The job cannot start before this process ends.
                if excluded := self._without(request):
                    update = ("scontrol", "update", f"JobId={self.job_id}", f"ExcNodeList={excluded}")
                    self._can_leave_out(request, update)
                return Queued(self.job_id, requeue)
            request.say(f"ddp-hpc: scontrol requeue failed: {answer.said}; submitting a new job instead")
        excluded = self._without(request)
        environ = self._environ_of_sbatch()
        environ["DDP_HPC_ATTEMPT"] = str(request.attempt)
        options = [f"--dependency=afterany:{self.job_id}", *self._request()]
        options += [f"--exclude={excluded}"] if excluded else []
        words = ("sbatch", *options, str(request.script), *self.arguments)
        answer = commands.submit_until(
            words, request.until_s, request.on_unreachable, environ=environ, cwd=self.work_dir
        )
        if answer.code:
            raise DdpHpcError(f"sbatch failed: {answer.said}")
        last = (answer.out.rstrip().splitlines() or [""])[-1]
        if (job_id := job_id_of(last)) is None:
            raise DdpHpcError(f"sbatch printed no job ID; check whether the job is queued: {answer.said}")
        return Queued(job_id, words)

    def _without(self, request: Successor) -> str:
        """Returns the nodes that the job should not get, as a list for Slurm; empty if there are none, or if
        the job could not run without them.
        """
        if not request.leave_out:
            return ""
        before = ""
        with suppress(commands.NoAnswerError):
            job = commands.run(("scontrol", "--oneliner", "show", "job", self.job_id), _ASK_LIMIT_S)
            before = fields_of(job.out).get("ExcNodeList", "").replace("(null)", "")
        excluded = ",".join(filter(None, (before, *request.leave_out)))
        # Seen with Slurm 22.05: a job with too few nodes left waits forever (BadConstraints).
        test = ("sbatch", "--test-only", f"--exclude={excluded}", *self._request(), str(request.script))
        return excluded if self._can_leave_out(request, test) else ""

    def _can_leave_out(self, request: Successor, argv: Sequence[str]) -> bool:
        """Runs a command that is needed to leave nodes out, and returns whether it succeeds; if not, says
        why.
        """
        try:
            answer = commands.run(argv, _ASK_LIMIT_S, self._environ_of_sbatch(), self.work_dir)
            if answer.code == 0:
                return True
            why = answer.said
        except commands.NoAnswerError as error:
            why = str(error)
        nodes = ", ".join(request.leave_out)
        request.say(f"ddp-hpc: the next job of the run can get {nodes} again: {why}")
        return False

    def _environ_of_sbatch(self) -> dict[str, str]:
        return without_job(self.environ, ("SLURM", "SRUN_", "SBATCH_"), keep="SLURM_CONF")

    def _request(self) -> list[str]:
        """Returns options of sbatch that the user may have given on the command line."""
        index = self.environ.get("SLURM_ARRAY_TASK_ID")
        options = [f"--array={index}"] if index else []
        if (name := self.environ.get("SLURM_JOB_PARTITION")) and not _QOS.search(self.script):
            options.append(f"--partition={name}")
        if name := self.environ.get("SLURM_JOB_ACCOUNT"):
            options.append(f"--account={name}")
        return options


def _is_orphan(host: str, pid: int) -> bool:
    """Returns whether a step was created on this node, by an srun that no longer runs."""
    return host.partition(".")[0] == gethostname().partition(".")[0] and not is_running(pid)
