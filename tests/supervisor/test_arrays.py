"""Job arrays, and arguments of job scripts, with stand-ins; tests/slurm/test_arrays.py uses a real Slurm."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ddp_hpc.queue.run_directories import runs_in
from ddp_hpc.schedulers.registry import SCHEDULERS
from tests.batch.conftest import Sandbox
from tests.batch.test_requeue import SAY, calls, command, job
from tests.batch.test_scripts_run import script, slurm
from tests.fakes.site import PROJECT, Site, program
from tests.pbs.conftest import MakeSite, make_site, site
from tests.pbs.test_chain import TRAINER, chain_script

__all__ = ["MakeSite", "job", "make_site", "site"]

TASK = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}


def run(
    job: Sandbox, then: str, *arguments: str, text: str = "", **environ: str
) -> subprocess.CompletedProcess[str]:
    """Runs Slurm job 9 with these arguments of its script; srun runs the bash text `then`."""
    job.launcher("srun", then=SAY + then)
    variables = {"SLURM_JOB_ID": "9", "SLURM_JOB_END_TIME": str(int(time.time()) + 3600), **environ}
    path = job.write(text or script("generic_slurm"))
    return subprocess.run(
        ["bash", path, *arguments],
        cwd=job.work,
        env=job.environ(**slurm(job, 1, **variables)),
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_arguments_of_the_script_reach_the_program_and_the_resume_command(job: Sandbox) -> None:
    for name in ("scontrol", "sbatch"):
        command(job, name, code=1)
    done = run(job, "say requeue 3", "--model", "a b")
    assert job.words()[-2:] == ["--model", "a b"]
    assert calls(job, "sbatch")[0].endswith("/runs/ddp/job.sh --model a b")
    assert f"&& sbatch {job.work}/runs/ddp/job.sh --model 'a b'" in done.stderr


def test_a_task_of_a_slurm_array_has_its_own_run_directory_and_is_requeued_alone(job: Sandbox) -> None:
    done = run(job, "say requeue 3", **TASK)
    assert done.returncode == 75
    assert job.seen()["DDP_HPC_RUN_DIR"] == f"{job.work}/runs/ddp/task-3"
    assert calls(job, "scontrol") == ["requeue 7_3"]
    assert not (job.work / "runs/ddp/state").exists()


def test_if_requeue_fails_the_task_becomes_an_array_of_its_index(job: Sandbox) -> None:
    command(job, "scontrol", code=1)
    run(job, "say requeue 3", **TASK)
    assert "--dependency=afterany:7_3 --array=3 " in calls(job, "sbatch")[0]


def test_the_command_that_resumes_a_task_contains_its_index(job: Sandbox) -> None:
    for name in ("scontrol", "sbatch"):
        command(job, name, code=1)
    done = run(job, "say requeue 3", **TASK)
    assert done.stderr.rstrip().endswith(f"&& sbatch --array=3 {job.work}/runs/ddp/task-3/job.sh")


def test_a_script_that_derives_its_run_directory_from_the_index_keeps_it(job: Sandbox) -> None:
    own = 'export DDP_HPC_RUN_DIR="$PWD"/runs/mine-$SLURM_ARRAY_TASK_ID'
    text = script("generic_slurm").replace('export DDP_HPC_RUN_DIR="$PWD"/runs/ddp', own)
    run(job, "say done 3", text=text, **TASK)
    assert job.seen()["DDP_HPC_RUN_DIR"] == f"{job.work}/runs/mine-3"


def test_each_subjob_of_a_pbs_array_has_its_own_run_which_its_successors_resume(site: Site) -> None:
    job = chain_script(site, "10", "20", "requeue", options=["--setup", 'echo "task $PBS_ARRAY_INDEX"'])
    site.submit("-J", "1-2", job)
    for number in ("12[1].pbs-srv", "12[2].pbs-srv", "13.pbs-srv", "14.pbs-srv"):
        site.wait(number)
    runs = site.work / "runs" / "ddp"
    assert sorted(path.name for path in runs.iterdir()) == ["task-1", "task-2"]
    for index in (1, 2):
        assert (runs / f"task-{index}/state").read_text() == "done 20\n"
        starts = (runs / f"task-{index}/attempts").read_text().splitlines()
        assert starts[0].startswith(f"1 12[{index}].pbs-srv 0 ")
        assert starts[1].startswith("2 1")
    logs = "".join(path.read_text() for path in site.work.glob("ddp.o1[34]"))
    assert sorted(line for line in logs.splitlines() if line.startswith("task ")) == ["task 1", "task 2"]


@pytest.mark.check
def test_the_successor_of_a_subjob_is_not_the_whole_array_of_the_directives(site: Site) -> None:
    job = chain_script(site, "10", "20", "requeue", options=["--array", "1-2"])
    assert "#PBS -J 1-2\n" in job.read_text()
    assert site.submit(job) == "12[].pbs-srv"
    for number in ("12[1].pbs-srv", "12[2].pbs-srv", "13.pbs-srv", "14.pbs-srv"):
        site.wait(number)
    for index in (1, 2):
        run_dir = site.work / "runs" / "ddp" / f"task-{index}"
        assert (run_dir / "state").read_text() == "done 20\n"
        assert "#PBS -J" not in (run_dir / "job.sh").read_text()


@pytest.mark.check
def test_the_successor_of_a_subjob_waits_until_the_subjob_has_ended(site: Site) -> None:
    """PBS itself accepts no dependency on a subjob."""
    job = chain_script(
        site, "10", "20", "requeue", options=["--after", "sleep 1; touch ended-$PBS_ARRAY_INDEX"]
    )
    program(
        site.root / "trainer.sh", TRAINER.replace("say running", "ls ended-$PBS_ARRAY_INDEX\nsay running", 1)
    )
    site.submit("-J", "1-2", job)
    for number in ("12[1].pbs-srv", "12[2].pbs-srv", "13.pbs-srv", "14.pbs-srv"):
        site.wait(number)
    logs = [path.read_text() for path in site.work.glob("ddp.o1[34]")]
    assert sorted(line for log in logs for line in log.splitlines() if line.startswith("ended-")) == [
        "ended-1",
        "ended-2",
    ]


@pytest.mark.check
def test_status_names_the_command_that_submits_the_one_task_again(site: Site) -> None:
    program(site.root / "bin" / "qsub", "#!/bin/sh\necho 'qsub: no' >&2\nexit 1\n")
    site.submit(chain_script(site, "10", "20", "requeue", options=["--array", "1-2"]))
    (task, *_) = (site.wait(f"12[{index}].pbs-srv") for index in (1, 2))
    assert task["Exit_status"] == 75
    argv = [sys.executable, "-m", "ddp_hpc", "status", "12[1].pbs-srv"]
    shown = site.run(*argv, env={"PYTHONPATH": str(PROJECT)}).stdout.splitlines()
    assert shown[-2].startswith("action    resume the run with the command in `resume`")
    command = shown[-1].removeprefix("resume    ")
    again = site.run("bash", "-c", command).stdout.strip()
    assert site.wait(again)["Exit_status"] == 0
    runs = site.work / "runs" / "ddp"
    assert [(runs / f"task-{index}/state").read_text().split()[0] for index in (1, 2)] == ["done", "requeue"]


@pytest.mark.check
def test_the_successor_of_a_subjob_gets_the_resources_of_the_command_line(site: Site) -> None:
    """OpenPBS does not copy the command line of qsub to a subjob (create_subjob in array_func.c)."""
    job = chain_script(site, "10", "20", "requeue")
    job.write_text(re.sub(r"#PBS -l walltime=.*\n", "", job.read_text()))
    site.submit("-J", "1-2", "-l", "walltime=00:07:00", job)
    assert "Submit_arguments" not in site.wait("12[1].pbs-srv")
    found = [site.wait(number)["Resource_List"]["walltime"] for number in ("13.pbs-srv", "14.pbs-srv")]
    assert found == ["00:07:00"] * 2


def test_qsub_refuses_arguments_of_a_script(site: Site) -> None:
    job = chain_script(site, "10", "20", "requeue")
    done = site.run("qsub", job, "--epochs", "3")
    assert done.returncode == 2
    assert done.stderr.startswith("qsub: ")


@pytest.mark.parametrize(
    ("scheduler", "environ", "index"),
    [
        ("slurm", {"SLURM_ARRAY_TASK_ID": "0"}, "0"),
        ("pbs", {"PBS_ARRAY_INDEX": "12"}, "12"),
        ("pbs", {"PBS_ARRAYID": "4"}, "4"),
        ("slurm", {"SLURM_ARRAY_TASK_ID": "../x"}, ""),
        ("local", {"SLURM_ARRAY_TASK_ID": "1"}, ""),
    ],
)
def test_the_index_of_a_task_is_that_of_the_scheduler(
    scheduler: str, environ: dict[str, str], index: str
) -> None:
    assert SCHEDULERS[scheduler].inside_job.array_index(environ) == index


@pytest.mark.parametrize(
    ("scheduler", "environ", "job_id"),
    [
        ("slurm", {"SLURM_JOB_ID": "9"}, "9"),
        ("slurm", {"SLURM_JOB_ID": "9", **TASK}, "7_3"),
        ("pbs", {"PBS_JOBID": "7[3].pbs-srv", "PBS_ARRAY_INDEX": "3"}, "7[3].pbs-srv"),
    ],
)
def test_the_id_of_a_task_is_not_that_of_the_whole_array(
    scheduler: str, environ: dict[str, str], job_id: str
) -> None:
    assert SCHEDULERS[scheduler].inside_job.job_id(environ) == job_id


def test_status_lists_the_runs_of_an_array_instead_of_the_directory_of_the_array(tmp_path: Path) -> None:
    for name in ("runs/ddp", "runs/ddp/task-0", "runs/ddp/task-1", "runs/other"):
        (tmp_path / name).mkdir(parents=True)
        file = "submitted" if name == "runs/ddp" else "attempts"
        (tmp_path / name / file).write_text("1 7 0 1700000000\n")

    def runs() -> set[str]:
        return {str(path.relative_to(tmp_path)) for path in runs_in(tmp_path)}

    assert runs() == {"runs/ddp/task-0", "runs/ddp/task-1", "runs/other"}
    # An earlier job without an array has run in the same directory.
    (tmp_path / "runs/ddp/attempts").write_text("1 5 0 1600000000\n")
    assert "runs/ddp" in runs()
