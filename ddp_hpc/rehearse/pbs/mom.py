"""Stand-in for the daemon pbs_mom, which runs one job: environment, node file, logs, walltime and end.

The process tree is the same as in PBS: a login shell leads the session of the job, reads the path of the
script's copy from a pipe and runs it. Signals are sent to all processes of this session and to no others.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from ddp_hpc.base import process_control
from ddp_hpc.base.units import format_walltime
from ddp_hpc.rehearse import jobs
from ddp_hpc.rehearse.daemon import Daemon, open_log
from ddp_hpc.rehearse.launchers.failure import down_file
from ddp_hpc.rehearse.pbs import server

WALLTIME_EXCEEDED, START_FAILED, SISTER_LOST = -29, -3, -14
_RERUN = "will run again"


class Mom(Daemon):
    """The daemon that runs one job, from its start to its final attributes."""

    def __init__(self, root: Path, number: int) -> None:
        self.settings = server.Settings.read(root)
        super().__init__(root, number, self.settings)
        self.id = server.job_id(number, self.job["server"])

    def run(self) -> None:
        """Runs the job, repeatedly if it is requeued, and then starts the jobs that depend on it."""
        while self._run_once() == _RERUN:
            # As in PBS, all runs have the same id and environment.
            self.update(job_state="Q", substate=10)
            while self._down_s() and not (self.delete_request.exists() or self.keeper_is_gone()):
                time.sleep(self.settings.poll_s)
        if not self.keeper_is_gone():
            server.schedule(self.root)

    def _run_once(self) -> str:
        """Runs the job once and returns how it ended."""
        try:
            out, err = self._open_logs()
        except OSError:
            comment = "job held, too many failed attempts to run"
            self.update(job_state="H", Hold_Types="s", Exit_status=START_FAILED, comment=comment)
            return "held"
        shell = self._start(out, err)
        self.update(
            job_state="R", substate=42, stime=time.ctime(), session_id=shell.pid, **self._where(),
            run_count=self.job.get("run_count", 0) + 1,
        )  # fmt: skip
        server.schedule(self.root)  # jobs with `depend=after` wait for this start
        start_s = time.monotonic()
        exit_status, how = self._watch(shell, err)
        self._clear_up()
        if how == _RERUN:
            return how  # the next run appends to the spooled logs
        self._deliver_logs()
        comment = jobs.load(self.root, self.number)["comment"]
        substate = 92 if exit_status == 0 else 91 if "terminated" in how else 93
        self.update(
            job_state="F", substate=substate, Exit_status=exit_status,
            resources_used={"walltime": format_walltime(int(time.monotonic() - start_s))},
            comment=comment if " and terminated" in comment else f"{comment} and {how}",
        )  # fmt: skip
        return how

    def _where(self) -> dict[str, str]:
        names = [chunk["node"].partition(".")[0] for chunk in self.job["_chunks"]]
        return {
            "exec_host": "+".join(f"{name}/0" for name in names),
            "comment": f"Job run at {time.strftime('%a %b %d at %H:%M')} on {'+'.join(names)}",
        }

    def _open_logs(self) -> tuple[IO[bytes], IO[bytes]]:
        out = self._open_log("OU", self.job["Output_Path"])
        joined = self.job["Join_Path"] == "oe"
        return out, out if joined else self._open_log("ER", self.job["Error_Path"])

    def _open_log(self, ending: str, destination: str) -> IO[bytes]:
        """Opens the final log file with -k doe, or else a spool file that is delivered at the end."""
        path = Path(destination.partition(":")[2]) if self._writes_direct() else self._spooled(ending)
        if not self._writes_direct():
            path.parent.mkdir(parents=True, exist_ok=True)
        return open_log(path, os.O_APPEND, 0o600)

    def _writes_direct(self) -> bool:
        return "d" in self.job["Keep_Files"]

    def _spooled(self, ending: str) -> Path:
        return self.root / "spool" / f"{self.id}.{ending}"

    def _deliver_logs(self) -> None:
        if self._writes_direct():
            return
        for ending, name in (("OU", "Output_Path"), ("ER", "Error_Path")):
            spooled, destination = self._spooled(ending), Path(self.job[name].partition(":")[2])
            with suppress(OSError):  # a log that cannot be delivered stays where it is
                shutil.copy(spooled, destination)
                destination.chmod(0o600)
                spooled.unlink()

    def _environment(self) -> dict[str, str]:
        """Returns the environment of the login shell, which has no variables of the submitting shell."""
        home, chunk = str(self.root / "home"), self.job["_chunks"][0]
        nodefile = self.root / "aux" / self.id
        nodefile.parent.mkdir(exist_ok=True)
        lines = [chunk["node"] for chunk in self.job["_chunks"] for _ in range(chunk["mpiprocs"])]
        nodefile.write_text("".join(f"{line}\n" for line in lines))
        tmpdir = self.root / "var" / "tmp" / f"pbs.{self.id}"
        tmpdir.mkdir(parents=True, mode=0o700)
        account = {"PBS_ACCOUNT": self.job["Account_Name"]} if "Account_Name" in self.job else {}
        return {
            "PATH": "/bin:/usr/bin",
            "HOME": home,
            "LOGNAME": server.USER,
            "USER": server.USER,
            "SHELL": "/bin/bash",
            "ENVIRONMENT": "BATCH",
            "NCPUS": str(chunk["ompthreads"]),
            "OMP_NUM_THREADS": str(chunk["ompthreads"]),
            "TMPDIR": str(tmpdir),
            "PBS_ENVIRONMENT": "PBS_BATCH",
            "PBS_JOBCOOKIE": secrets.token_hex(16).upper(),
            "PBS_JOBDIR": home,
            "PBS_JOBID": self.id,
            "PBS_JOBNAME": self.job["Job_Name"],
            "PBS_NODEFILE": str(nodefile),
            "PBS_QUEUE": self.job["queue"],
            **account,
            **self.job["_variables_of_array"],
            **self.job["Variable_List"],
        }

    def _start(self, out: IO[bytes], err: IO[bytes]) -> subprocess.Popen[bytes]:
        """Starts the login shell, and writes the path of the script's copy to its stdin."""
        environment = self._environment()
        shell = subprocess.Popen(
            ["-bash"],
            executable="/bin/bash",
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=err,
            cwd=self.root / "home",
            env=environment,
            umask=self.job["_umask"],
            start_new_session=True,
        )
        assert shell.stdin is not None
        with suppress(BrokenPipeError):
            shell.stdin.write(f"{self.root}/mom_priv/jobs/{self.id}.SC\n".encode())
            shell.stdin.close()
        return shell

    def _watch(self, shell: subprocess.Popen[bytes], err: IO[bytes]) -> tuple[int, str]:
        """Waits until the session has ended. Returns Exit_status and how the job ended."""
        start_s = time.monotonic()
        while shell.poll() is None:
            time.sleep(self.settings.poll_s)
            # The walltime can be changed with qalter.
            limit_s = self.settings.walltime_s or jobs.load(self.root, self.number)["_walltime_s"]
            used_s = int(time.monotonic() - start_s)
            if self.keeper_is_gone():
                self._end(shell, grace_s=0.0)
                return 256 + signal.SIGKILL, "terminated"
            if limit_s and used_s > limit_s:
                err.write(f"=>> PBS: job killed: walltime {used_s} exceeded limit {limit_s}\n".encode())
                self._end(shell, self.settings.kill_delay_s)
                return WALLTIME_EXCEEDED, "exceeded resource walltime"
            if self.delete_request.exists():
                self._end(shell, self.settings.kill_delay_s)
                return 256 + signal.SIGTERM, f"terminated by {server.USER}@{self.job['server']}"
            if self._has_lost_sister():
                self._end(shell, grace_s=0.0)
                return SISTER_LOST, "failed" if self.job.get("Rerunable") == "False" else _RERUN
            if self.rerun_request.exists():
                self.update(substate=server.RERUN)
                self._end(shell, float(self.rerun_request.read_text()))
                self.rerun_request.unlink()
                return 256 + signal.SIGTERM, _RERUN
        code = shell.returncode
        self._end(shell, grace_s=0.0)  # end the processes that the script has left in the background
        return (code, "finished" if code == 0 else "failed") if code >= 0 else (256 - code, "failed")

    def _down_s(self) -> dict[str, float]:
        """Returns how long each of the job's nodes that are down has been down."""
        files = [down_file(self.root, chunk["node"]) for chunk in self.job["_chunks"]]
        return {file.name: time.time() - file.stat().st_mtime for file in files if file.exists()}

    def _has_lost_sister(self) -> bool:
        """Returns whether this job ends because another node than the first one has been down for too long.

        `job_start` tolerates lost nodes only until the job runs (do_tolerate_node_failures in job_func.c).
        """
        first = self.job["_chunks"][0]["node"]
        lost = [name for name, down_s in self._down_s().items() if down_s > self.settings.max_poll_downtime_s]
        return self.job.get("tolerate_node_failures") != "all" and any(name != first for name in lost)

    def _end(self, shell: subprocess.Popen[bytes], grace_s: float) -> None:
        """Sends SIGTERM to the session, which ends its shell, and SIGKILL after `grace_s`."""
        if grace_s:
            process_control.send(signal.SIGTERM, process_control.of_session(shell.pid))
        end_s = time.monotonic() + grace_s
        while process_control.of_session(shell.pid) and time.monotonic() < end_s:
            shell.poll()
            time.sleep(0.02)
        process_control.send(signal.SIGKILL, process_control.of_session(shell.pid))
        shell.wait()

    def _clear_up(self) -> None:
        """Kills processes that left the session, which PBS would ignore. Records their command lines."""
        command_lines = process_control.end_descendants(2.0, lambda: jobs.daemons(self.root))
        shutil.rmtree(self.root / "var" / "tmp" / f"pbs.{self.id}", ignore_errors=True)
        self.update(left_over=command_lines)


DAEMON = Mom
