"""The end of a job: directory and account of the successor, full disks, and answers that are lost."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from ddp_hpc.render.render_script import render
from ddp_hpc.request.job import Job
from ddp_hpc.sites.site import load_site
from tests.batch.conftest import Sandbox
from tests.batch.test_requeue import SAY, calls, command, folder, job
from tests.batch.test_scripts_run import pbs, script, slurm

__all__ = ["job"]

REQUEUE = SAY + "say requeue 3"
QSTAT = (
    "Job Id: 12.pbs-srv\n    Resource_List.walltime = 01:00:00\n    Submit_arguments = {arguments} job.sh\n"
)


def run_slurm(
    job: Sandbox, then: str, left_s: int = 3600, **options: object
) -> subprocess.CompletedProcess[bytes]:
    job.launcher("srun", then=then)
    end = str(int(time.time()) + left_s)
    return job.run(
        script("generic_slurm", **options), **slurm(job, 1, SLURM_JOB_ID="7", SLURM_JOB_END_TIME=end)
    )


def test_the_successor_is_submitted_in_the_submission_directory(job: Sandbox) -> None:
    """A script that changes to another directory would otherwise change to it again, relative to itself."""
    (job.work / "sub").mkdir()
    job.launcher("mpiexec", version="PALS", then=REQUEUE)
    job.program("qsub", f'#!/bin/bash\necho "$PWD $(pwd)" >{job.record}.where\necho 13.pbs-srv\n')
    job.run(script("generic_pbs", setup=("cd sub",), run_dir=str(folder(job))), **pbs(job, "a"))
    assert (job.folder / "record.where").read_text() == f"{job.work} {job.work}\n"


@pytest.mark.parametrize(
    ("arguments", "attributes", "expected"),
    [
        ("-P realproj -A tag", {"project": "realproj", "Account_Name": "tag"}, "-A tag -P realproj"),
        ("-Wgroup_list=grp", {"group_list": "grp"}, "-W group_list=grp"),
        ("-W umask=022,group_list=grp", {"group_list": "grp"}, "-W group_list=grp"),
        ("-W depend=afterok:1", {"project": "_pbs_project_default"}, ""),
    ],
)
def test_all_accounting_options_of_qsub_are_passed_on(
    job: Sandbox, arguments: str, attributes: dict[str, str], expected: str
) -> None:
    says = QSTAT.format(arguments=arguments) + "".join(f"    {k} = {v}\n" for k, v in attributes.items())
    command(job, "qstat", says=says)
    job.launcher("mpiexec", version="PALS", then=REQUEUE)
    job.run(script("generic_pbs"), **pbs(job, "a"))
    (words,) = calls(job, "qsub")
    assert words.startswith(f"{expected} -l walltime=01:00:00 -W depend=".lstrip())


@pytest.mark.parametrize(
    "says",
    [
        "slurm_requeue error: Socket timed out on send/recv operation",
        "Unexpected message received for job 7",  # slurmctld of Slurm 22.05 was down
    ],
)
def test_a_requeue_whose_answer_was_lost_is_not_followed_by_a_second_job(job: Sandbox, says: str) -> None:
    job.program("scontrol", f'#!/bin/bash\n[[ $1 == show ]] || {{ echo "{says}" >&2; exit 1; }}\n')
    done = run_slurm(job, REQUEUE, env={"DDP_HPC_KILL_DELAY_S": "1"}, left_s=4)
    assert (done.returncode, calls(job, "sbatch")) == (75, [])
    assert "It is unknown whether the request was accepted" in done.stderr.decode()
    assert "to resume: cd " in done.stderr.decode()


def test_a_full_log_does_not_prevent_the_requeue(job: Sandbox) -> None:
    job.launcher("srun", then=REQUEUE)
    environ = job.environ(**slurm(job, 1, SLURM_JOB_ID="7", SLURM_JOB_END_TIME=str(int(time.time()) + 3600)))
    with Path("/dev/full").open("w") as full:
        path = job.write(script("generic_slurm"))
        done = subprocess.run(["bash", path], cwd=job.work, env=environ, stdout=full, stderr=full)
    assert (done.returncode, calls(job, "scontrol")) == (75, ["requeue 7"])


def test_a_full_disk_does_not_prevent_the_requeue_of_another_program(
    job: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    sitecustomize = job.folder / "full" / "sitecustomize.py"
    sitecustomize.parent.mkdir()
    sitecustomize.write_text(
        "import ddp_hpc.supervisor.run_files as files\n"
        "from ddp_hpc.base.errors import DdpHpcError\n"
        "def full(*_): raise DdpHpcError('no space left on device')\n"
        "files.write_state = full\n"
    )
    job.launcher("srun", then='touch "$DDP_HPC_PROGRESS_FILE"; exit 75')
    end = str(int(time.time()) + 3600)
    path = f"{sitecustomize.parent}:{os.environ.get('PYTHONPATH', '')}:{Path.cwd()}"
    done = job.run(
        script("generic_slurm", command=("./program",)),
        **slurm(job, 1, SLURM_JOB_ID="7", SLURM_JOB_END_TIME=end, PYTHONPATH=path),
    )
    assert (done.returncode, calls(job, "scontrol")) == (75, ["requeue 7"])
    assert (
        "error: no space left on device; the state of the run is: requeue the program exited"
        in done.stderr.decode()
    )


def test_variables_of_the_user_take_precedence_over_the_supervisors(job: Sandbox) -> None:
    tmpdir = "/scratch/project_465000000/a-user/with-a-long-name/tmp"
    run_slurm(job, "exit 0", env={"TMPDIR": tmpdir, "DDP_HPC_DEADLINE": "1000"})
    assert job.seen()["TMPDIR"] == tmpdir
    assert job.seen()["DDP_HPC_DEADLINE"] == "1000"


def test_a_deadline_that_comes_from_another_job_does_not_count(job: Sandbox) -> None:
    """A job that is submitted by a rank of another job inherits its variables."""
    job.launcher("srun", then="exit 0")
    end = str(int(time.time()) + 3600)
    inherited = {"DDP_HPC_DEADLINE": "1000", "DDP_HPC_DEADLINE_SOURCE": "slurm"}
    job.run(script("generic_slurm"), **slurm(job, 1, SLURM_JOB_ID="7", SLURM_JOB_END_TIME=end, **inherited))
    assert job.seen()["DDP_HPC_DEADLINE"] == end


def test_the_launcher_does_not_read_the_input_of_the_script(job: Sandbox) -> None:
    job.launcher("srun", then="cat >read")
    environ = job.environ(**slurm(job, 1))
    path = job.write(script("generic_slurm", command=("./program",)))
    subprocess.run(["bash", path], cwd=job.work, env=environ, input=b"text", check=True)
    assert (job.work / "read").read_bytes() == b""


def test_a_state_that_cannot_be_read_is_left_as_it_is(job: Sandbox) -> None:
    done = run_slurm(job, "echo 'state of my own' >$DDP_HPC_RUN_DIR/state; exit 75")
    assert done.returncode == 75
    assert (folder(job) / "state").read_text() == "state of my own\n"


def test_a_local_script_runs_after_a_change_of_directory(job: Sandbox) -> None:
    (job.work / "sub").mkdir()
    mpiexec = job.launcher("mpiexec")
    text = render(Job(setup=("cd sub",)), load_site("local"))
    (job.work / "l.sh").write_text(text)
    environ = job.environ(DDP_HPC_MPIEXEC=str(mpiexec))
    done = subprocess.run(["bash", "l.sh"], cwd=job.work, env=environ, capture_output=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "given", [["python", "train.py", "--lang", "python", "-u"], ["python3", "-u", "train.py"]]
)
def test_torchrun_gets_the_arguments_of_the_program_unchanged(given: list[str]) -> None:
    text = script("generic_slurm", launcher="torchrun", command=tuple(given))
    assert text.splitlines()[-1].endswith(f'torchrun_script.sh {" ".join(given)} "$@"')
