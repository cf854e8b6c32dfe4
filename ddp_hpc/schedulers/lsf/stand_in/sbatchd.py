"""Stand-in for the daemon sbatchd, which runs one job: environment, output, signals and run limit.

At the run limit all processes of the job get SIGUSR2, and SIGKILL later (bsub -W). bkill sends SIGKILL to a
parallel job at once, and SIGINT, SIGTERM and SIGKILL to a sequential one (LSB_USE_SEQUENTIAL_SIGNAL).
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

from ddp_hpc import process_control
from ddp_hpc.rehearse.daemon import Daemon
from ddp_hpc.schedulers.lsf.stand_in import cluster

_RUN_LIMIT = "TERM_RUNLIMIT: job killed after reaching LSF run time limit"
_OWNER = "TERM_OWNER: job killed by owner"


class Sbatchd(Daemon):
    """The daemon that runs one job, from its start to its end."""

    def __init__(self, root: Path, number: int) -> None:
        self.settings = cluster.Settings.read(root)
        super().__init__(root, number, self.settings)

    def run(self) -> None:
        """Runs the job until it has ended."""
        spool = Path(f"{self.job['file']}.out")
        self.update(stat="RUN", start=time.time())
        with spool.open("wb", buffering=0) as out:
            try:
                argv = [f"{self.job['file']}.shell"]
                shell = self.start_shell(argv, out, out, self.job["cwd"], self.environment())
            except OSError as error:
                out.write(f"{self.job['file']}.shell: {error.strerror}\n".encode())
                self.finish(spool, 127, "", [])
                return
            reason = self.watch(shell)
        left_over = process_control.end_descendants(0.5)
        code = shell.returncode
        self.finish(spool, code if code >= 0 else 128 - code, reason, left_over)

    def environment(self) -> dict[str, str]:
        """Returns the job's initial environment: the submitter's variables and those that LSF sets."""
        job, settings = self.job, self.settings
        pairs = list(zip(job["nodes"], job["slots"], strict=True))
        if job["whole_nodes"]:
            pairs.insert(0, (settings.launch_node, 1))
        hosts = [node for node, count in pairs for _ in range(count)]
        hostfile = Path(f"{job['file']}.hostfile")
        hostfile.write_text("".join(f"{host}\n" for host in hosts))
        found = {
            "LSB_JOBID": str(self.number),
            "LSB_BATCH_JID": str(self.number),
            "LSB_JOBINDEX": str(job.get("array_index", 0)),
            "LSB_JOBNAME": job["name"] + (f"[{job['array_index']}]" if "array_index" in job else ""),
            "LSB_QUEUE": job["queue"],
            "LSB_PROJECT_NAME": job["project"],
            "LSB_JOBFILENAME": job["file"],
            "LSB_CHKFILENAME": job["file"],
            "LSB_SUB_HOST": os.uname().nodename,
            "LSB_HOSTS": " ".join(hosts),
            "LSB_MCPU_HOSTS": " ".join(f"{node} {count}" for node, count in pairs),
            "LSB_DJOB_NUMPROC": str(len(hosts)),
            "LSB_DJOB_HOSTFILE": str(hostfile),
            "LSB_DJOB_RANKFILE": str(hostfile),
            "LS_SUBCWD": job["cwd"],
            "LS_JOBPID": str(os.getpid()),
        }
        if job["whole_nodes"]:
            found["CSM_ALLOCATION_ID"] = str(self.number)
        return {**job["environment"], **found}

    def watch(self, shell: subprocess.Popen[bytes]) -> str:
        """Waits until the job has ended. Returns why LSF ended it; empty if its script ended by itself."""
        limit_s = self.job["walltime_s"]
        end_s = self.job["start"] + limit_s if limit_s else float("inf")
        while shell.poll() is None:
            time.sleep(self.settings.poll_s)
            if self.keeper_is_gone():
                self.end(shell, ())
                return _OWNER
            if time.time() >= end_s:
                self.send(signal.SIGUSR2)
                self.wait(shell, self.settings.grace_s)
                self.end(shell, self.first_signals())
                return _RUN_LIMIT
            if self.delete_request.exists():
                self.end(shell, self.first_signals())
                return _OWNER
            if self.rerun_request.exists():
                self.send(int(self.rerun_request.read_text()))
                self.rerun_request.unlink()
        return ""

    def first_signals(self) -> tuple[signal.Signals, ...]:
        """Returns the signals that the job receives before SIGKILL."""
        is_sequential = self.settings.is_sequential or self.job["num_slots"] == 1
        return (signal.SIGINT, signal.SIGTERM) if is_sequential else ()

    def send(self, number: int) -> None:
        """Sends a signal to all processes of the job."""
        process_control.send(number, process_control.descendants(os.getpid()))

    def end(self, shell: subprocess.Popen[bytes], before: tuple[signal.Signals, ...]) -> None:
        """Sends these signals with pauses between them, then sends SIGKILL to all remaining processes."""
        for number in before:
            if shell.poll() is None:
                self.send(number)
                self.wait(shell, self.settings.kill_delay_s)
        if shell.poll() is None:
            shell.kill()
        process_control.end_descendants(0.0)
        shell.wait()

    def finish(self, spool: Path, code: int, reason: str, left_over: list[str]) -> None:
        """Writes a report and the output of the job to the file of -o, and records the end of the job."""
        how = "Successfully completed." if code == 0 else f"Exited with exit code {code}."
        reason = reason if code else ""
        why = f"{reason}.\n" if reason else ""
        if self.job["output"]:
            path = cluster.output_path(self.number, self.job)
            subject = f"Job {self.number}: <{self.job['name']}> in cluster <{self.settings.cluster}>"
            head = f"Subject: {subject} {'Exited' if code else 'Done'}\n\n{why}{how}\n"
            text = f"\n{'-' * 60}\n{head}\nThe output (if any) follows:\n\n"
            try:
                with path.open("wb" if self.job["overwrites"] else "ab") as file:
                    file.write(text.encode("utf-8", "surrogateescape") + spool.read_bytes())
            except OSError:
                reason = reason or "the output file cannot be written"
        stat = "DONE" if code == 0 else "EXIT"
        self.update(end=time.time(), stat=stat, exit_code=code, exit_reason=reason, left_over=left_over)


DAEMON = Sbatchd
