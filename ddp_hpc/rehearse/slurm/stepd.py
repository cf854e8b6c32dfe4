"""Stand-in for slurmstepd, which runs one job: environment, logs, signals, time limit and requeue.

The batch shell runs the script's copy in the directory of submission. Signals are sent to all processes
of the steps and to the batch shell, but never to srun, which would end the ranks immediately.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import IO

from ddp_hpc.base import process_control
from ddp_hpc.rehearse import jobs
from ddp_hpc.rehearse.daemon import Daemon, open_log
from ddp_hpc.rehearse.slurm import controller
from ddp_hpc.rehearse.slurm.controller import hostlist, run_lengths

_REQUEUE = "REQUEUED"


class Stepd(Daemon):
    """The daemon that runs one job, from its start to its final state."""

    def __init__(self, root: Path, number: int) -> None:
        self.settings = controller.Settings.read(root)
        super().__init__(root, number, self.settings)

    def run(self) -> None:
        """Runs the job, repeatedly if it is requeued, and then starts the jobs that depend on it."""
        while self._run_once() == _REQUEUE:
            if not controller.may_run(self.root):
                self.update(reason=controller.HELD)
                return
        if not self.keeper_is_gone():
            controller.schedule(self.root)

    def _run_once(self) -> str:
        """Runs the job once and returns its final state."""
        try:
            out, err = self._open_logs()
        except OSError:
            # If Slurm cannot open the log file, it does not start the batch shell.
            self.update(state="FAILED", reason="RaisedSignal:53(Real-time_signal_19)", exit_code="0:53")
            return "FAILED"
        now_s = int(time.time())
        limit_s = self.job["walltime_s"]
        self.update(state="RUNNING", reason="None", runs=self.job["runs"] + 1)
        self.update(start=now_s, end=now_s + limit_s if limit_s else 0)
        try:
            argv = [self.job["script"], *self.job["arguments"]]
            shell = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                cwd=self.job["workdir"],
                env=self._environment(),
                start_new_session=True,
            )
        except OSError as error:
            text = f"execve(): {self.job['script']}: {error.strerror}"
            err.write(controller.of_stepd(text).encode())
            self.update(state="FAILED", reason="NonZeroExitCode", exit_code="2:0")
            return "FAILED"
        state = self._watch(shell, err)
        left_over = process_control.end_descendants(0.5, lambda: jobs.daemons(self.root))
        code = shell.returncode
        exit_code = f"{code}:0" if code >= 0 else f"0:{-code}"
        if state == _REQUEUE:
            self.update(state="PENDING", reason="BeginTime", left_over=left_over)
        else:
            state = state or ("COMPLETED" if code == 0 else "FAILED")
            self.update(state=state, exit_code=exit_code, left_over=left_over)
        return state

    def _open_logs(self) -> tuple[IO[bytes], IO[bytes]]:
        """Opens the files for stdout and stderr; without --error they are the same file."""
        flags = os.O_APPEND if self.job["append"] else os.O_TRUNC
        patterns = [pattern for pattern in (self.job["output"], self.job["error"]) if pattern]
        for pattern in patterns:  # since Slurm 23.02
            log_path(self.job, pattern).parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        out, *err = [open_log(log_path(self.job, pattern), flags, 0o644) for pattern in patterns]
        return out, err[0] if err else out

    def _environment(self) -> dict[str, str]:
        """Returns the batch shell's initial environment: the submitter's variables and those of Slurm."""
        job, nodes = self.job, self.job["nodes"]
        job_id, counts, cpus = str(self.number), job["counts"], int(job["given"].get("cpus-per-task", "1"))
        names = hostlist(nodes)
        variables = {
            "ENVIRONMENT": "BATCH",
            "HOSTNAME": nodes[0],
            "SLURMD_NODENAME": nodes[0],
            "SLURM_CLUSTER_NAME": self.settings.cluster,
            "SLURM_CPUS_ON_NODE": str(counts[0] * cpus),
            "SLURM_GTIDS": "0",
            "SLURM_JOBID": job_id,
            "SLURM_JOB_CPUS_PER_NODE": run_lengths([count * cpus for count in counts]),
            "SLURM_JOB_ID": job_id,
            "SLURM_JOB_NAME": job["name"],
            "SLURM_JOB_NODELIST": names,
            "SLURM_JOB_NUM_NODES": str(len(nodes)),
            "SLURM_JOB_PARTITION": job["partition"],
            "SLURM_JOB_START_TIME": str(job["start"]),
            "SLURM_JOB_USER": job["user"],
            "SLURM_LOCALID": "0",
            "SLURM_NNODES": str(len(nodes)),
            "SLURM_NODEID": "0",
            "SLURM_NODELIST": names,
            "SLURM_PROCID": "0",
            "SLURM_SUBMIT_DIR": job["workdir"],
            "SLURM_SUBMIT_HOST": os.uname().nodename,
            "SLURM_TASKS_PER_NODE": run_lengths(counts),
        }
        if job["end"]:
            variables["SLURM_JOB_END_TIME"] = str(job["end"])
        if job["has_num_tasks"]:
            variables["SLURM_NTASKS"] = variables["SLURM_NPROCS"] = str(sum(counts))
        if job["runs"] > 1:
            variables["SLURM_RESTART_COUNT"] = str(job["runs"] - 1)
        variables |= {**self._variables_of_array(job_id), **self._variables_of_options()}
        return {**self.job["environment"], **variables}

    def _variables_of_options(self) -> dict[str, str]:
        given = self.job["given"]
        from_options = {
            "account": "SLURM_JOB_ACCOUNT",
            "qos": "SLURM_JOB_QOS",
            "cpus-per-task": "SLURM_CPUS_PER_TASK",
            "ntasks-per-node": "SLURM_NTASKS_PER_NODE",
            "gpus-per-node": "SLURM_GPUS_PER_NODE",
        }
        variables = {variable: given[option] for option, variable in from_options.items() if option in given}
        gpus = given.get("gpus-per-node", "").rpartition(":")[2]
        if gpus.isdecimal() and 0 < int(gpus) < 100:
            visible = ",".join(map(str, range(int(gpus))))
            variables |= {
                "SLURM_GPUS_ON_NODE": gpus,
                "SLURM_JOB_GPUS": visible,
                "CUDA_VISIBLE_DEVICES": visible,
            }
        return variables

    def _variables_of_array(self, job_id: str) -> dict[str, str]:
        """Returns the variables that a task of a job array has; no variables for other jobs."""
        indices = self.job.get("array_indices")
        if not indices:
            return {}
        step = re.search(r":([0-9]+)", self.job["given"]["array"])
        return {
            "SLURM_ARRAY_JOB_ID": job_id,
            "SLURM_ARRAY_TASK_ID": str(self.job["array_index"]),
            "SLURM_ARRAY_TASK_COUNT": str(len(indices)),
            "SLURM_ARRAY_TASK_MIN": str(indices[0]),
            "SLURM_ARRAY_TASK_MAX": str(indices[-1]),
            "SLURM_ARRAY_TASK_STEP": step[1] if step else "1",
        }

    def _watch(self, shell: subprocess.Popen[bytes], err: IO[bytes]) -> str:
        """Waits until the job has ended. Returns its forced state; empty if the script ended by itself."""
        target, name, before_s = self.job["signal"] or ["", "", 0.0]
        while shell.poll() is None:
            time.sleep(self.settings.poll_s)
            now_s = time.time()
            if self.keeper_is_gone():
                self._end(shell, grace_s=0.0)
                return "CANCELLED"
            if name and self.job["end"] and now_s >= self.job["end"] - before_s:
                self._warn(shell, target, name)
                name = ""
            if self.job["end"] and now_s >= self.job["end"]:
                self._stop(shell, err, "TIME LIMIT")
                return self._unless_requeued("TIMEOUT")
            if self.delete_request.exists():
                self._stop(shell, err, "")
                return "CANCELLED"
            if self.rerun_request.exists():
                self._stop(shell, err, "JOB REQUEUE")
        return self._unless_requeued("")

    def _unless_requeued(self, state: str) -> str:
        """Returns `state`, or REQUEUED if the job was requeued; a script can still requeue its job in its
        last seconds.
        """
        if not self.rerun_request.exists():
            return state
        self.rerun_request.unlink()
        return _REQUEUE

    def _warn(self, shell: subprocess.Popen[bytes], target: str, name: str) -> None:
        """Sends the signal of --signal to the batch shell if it has the prefix B:, otherwise to the steps."""
        number = int(name) if name.isdecimal() else signal.Signals[f"SIG{name}"].value
        targets = self._batch_shell(shell) if target == "B" else self._steps()
        process_control.send(number, targets)
        process_control.send(signal.SIGCONT, targets)

    def _stop(self, shell: subprocess.Popen[bytes], err: IO[bytes], why: str) -> None:
        """Ends the job with the message of slurmstepd, SIGTERM, and SIGKILL after KillWait."""
        err.write(controller.cancelled(self.number, self.job["nodes"][0], why).encode())
        self._end(shell, self.settings.kill_delay_s)

    def _end(self, shell: subprocess.Popen[bytes], grace_s: float) -> None:
        """Sends SIGTERM to the steps and the batch shell, and SIGKILL after `grace_s`."""
        if grace_s:
            for number in (signal.SIGCONT, signal.SIGTERM):
                process_control.send(number, self._steps())
            process_control.send(signal.SIGTERM, self._batch_shell(shell))
        end_s = time.monotonic() + grace_s
        while shell.poll() is None and time.monotonic() < end_s and not self.keeper_is_gone():
            time.sleep(0.02)
        process_control.end_descendants(0.0, lambda: jobs.daemons(self.root))
        shell.wait()

    def _steps(self) -> list[process_control.Process]:
        return controller.processes_of_steps(self.root, self.number)

    def _batch_shell(self, shell: subprocess.Popen[bytes]) -> list[process_control.Process]:
        return [process for process in process_control.processes() if process.pid == shell.pid]


def log_path(job: jobs.Attributes, pattern: str) -> Path:
    """Returns the path of a log from a pattern such as `%x-%j.out` and the attributes of the job."""
    number = str(job["number"])
    values = {"%": "%", "j": number, "J": number, "A": number, "x": job["name"], "N": job["nodes"][0]}
    values |= {
        "u": job["user"],
        "n": "0",
        "t": "0",
        "s": "batch",
        "a": str(job.get("array_index", 2**32 - 2)),
    }
    name = re.sub(r"%\d*([%jJAaxNunts])", lambda match: values[match[1]], pattern)
    return Path(job["workdir"]) / name


DAEMON = Stepd
