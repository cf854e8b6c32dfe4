"""`ddp-hpc submit` with an sbatch and a qsub that record their arguments and input."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ddp_hpc.base.run_outcomes import State
from ddp_hpc.base.run_state import RunState, write_state
from tests.conftest import clean_environ
from tests.queue.conftest import Programs, Run

REQUEST = ["--profile", "generic_slurm", "--nodes", "2", "--ranks-per-node", "1", "--gpus-per-node", "4"]
REQUEST += ["--cpus-per-node", "16"]
REQUEST += ["--walltime", "00:10:00"]
SCRIPT = "#!/bin/bash\n#SBATCH --nodes=1\n#SBATCH --time=00:10:00\nhostname\n"
PBS_SCRIPT = "#!/bin/bash\n#PBS -l select=1\n#PBS -l walltime=00:10:00\ncd $PBS_O_WORKDIR\nhostname\n"
SUPERVISED = "exec python -m ddp_hpc.job --scheduler pbs -- hostname\n"


@pytest.fixture
def sbatch(programs: Programs) -> Programs:
    programs.answers("sbatch", "12\n")
    return programs


def test_only_the_job_id_is_printed_and_the_job_is_recorded_with_the_script_of_render(
    work: Path, sbatch: Programs, run: Run
) -> None:
    rendered = run("render", *REQUEST, "--", "python", "train.py").out
    done = run("submit", *REQUEST, "--", "python", "train.py")
    assert (done.code, done.out) == (0, "12\n")
    [script] = (work / "runs" / "train").glob("job-*.sh")
    assert script.read_text() == rendered
    assert sbatch.called("sbatch") == [f"sbatch --parsable {script}"]
    line = json.loads((work / "runs" / "train" / "submitted").read_text())
    assert (line["job_id"], line["scheduler"], line["work_dir"]) == ("12", "slurm", str(work))
    assert line["argv"] == ["sbatch", "--parsable", str(script)]
    assert line["sha256"].startswith(script.stem.removeprefix("job-"))
    assert line["user"]


def test_the_job_gets_the_umask_of_the_user(work: Path, programs: Programs, run: Run) -> None:
    programs.answers("qsub", "12.srv\n")
    request = ["--profile", "generic_pbs", "--gpus-per-node", "0", "--walltime", "00:10:00"]
    before = os.umask(0o027)
    try:
        assert run("submit", *request).code == 0
    finally:
        os.umask(before)
    assert programs.called("qsub")[-1].startswith("qsub -W umask=027 ")


def test_one_line_says_that_no_job_resumes_the_program_and_what_to_do(
    work: Path, sbatch: Programs, run: Run
) -> None:
    (work / "train.py").write_text("import torch\n")
    done = run("submit", *REQUEST, "--walltime", "00:02:00", "--", "python", "train.py")
    assert done.code == 0
    [line] = [line for line in done.err.splitlines() if "resumed" in line]
    assert line.startswith("warning: ")
    assert "this program will not be resumed after 00:02:00, nor started again after a failure: train" in line
    assert "--requeue on-signal --progress" in line


def test_a_dry_run_prints_script_and_command_changes_nothing_and_needs_no_scheduler(
    work: Path, programs: Programs, run: Run
) -> None:
    rendered = run("render", *REQUEST).out
    done = run("submit", *REQUEST, "--dry-run")
    assert (done.code, done.out) == (0, rendered)
    assert "would run: sbatch --parsable " in done.err
    assert not list(work.iterdir())


def test_the_users_own_script_is_submitted_unchanged(work: Path, sbatch: Programs, run: Run) -> None:
    (work / "job.sh").write_text(SCRIPT)
    done = run("submit", "job.sh")
    assert (done.code, done.out) == (0, "12\n")
    assert sbatch.called() == ["sbatch --parsable job.sh"]
    assert [path.name for path in work.iterdir()] == ["job.sh"], "the script sets no run directory"


def test_nothing_in_a_script_or_its_name_is_run_by_a_shell(work: Path, sbatch: Programs, run: Run) -> None:
    name = "--wrap=a b;touch canary;$(touch canary).sh"
    (work / name).write_text(SCRIPT + "touch canary\n")
    assert run("submit", f"./{name}").code == 0
    assert sbatch.called() == [f"sbatch --parsable ./{name}"]
    assert not (work / "canary").exists()


def test_a_script_with_lint_errors_is_not_submitted(work: Path, sbatch: Programs, run: Run) -> None:
    (work / "job.sh").write_text(SCRIPT.replace("--time=00:10:00", "--time=soon"))
    done = run("submit", "job.sh")
    assert (done.code, done.out) == (2, "")
    assert "error: JOB011, line 3: " in done.err
    assert done.err.splitlines()[-1] == (
        "error: lint found 1 error, and nothing was submitted; "
        "fix the script, or use --force to submit it anyway"
    )
    assert not sbatch.called()
    assert run("submit", "job.sh", "--force").out == "12\n"


def test_a_program_that_rejects_its_arguments_is_not_submitted(
    work: Path, sbatch: Programs, run: Run
) -> None:
    (work / "train.py").write_text(
        "import argparse\nparser = argparse.ArgumentParser()\n"
        "parser.add_argument('--batch-size', type=int)\nargs = parser.parse_args()\n"
    )
    done = run("submit", *REQUEST, "--", "python", "train.py", "--batch_size", "8")
    assert done.code == 2
    assert "train.py has no option --batch_size; did you mean --batch-size?" in done.err
    assert not sbatch.called("sbatch --parsable")


def test_a_template_is_not_submitted(work: Path, sbatch: Programs, run: Run) -> None:
    Path("job.sh").write_text(
        "#!/bin/bash\n#SBATCH --time=00:10:00\n#SBATCH --nodes={{ nodes }}\nsrun ./a.out\n"
    )
    done = run("submit", "job.sh")
    assert done.code == 2
    assert "error: JOB027, line 3: " in done.err


def test_log_directories_are_created_before_the_submission(work: Path, programs: Programs, run: Run) -> None:
    """Without the directory, PBS holds the job, and Slurm ends it without a message."""
    programs.program("sbatch", '[[ -d logs/a && -d /"$PWD"/errors ]] && echo 12')
    logs = f"#SBATCH --output=logs/a/%j.out\n#SBATCH --error={work}/errors/%j/x.err\n"
    (work / "job.sh").write_text(
        SCRIPT.replace("hostname", "").replace("#SBATCH --time", f"{logs}#SBATCH --time")
    )
    (work / "errors").mkdir()
    assert run("submit", "job.sh").out == "12\n"
    assert not (work / "errors" / "%j").exists()
    programs.program("qsub", "[[ -d out ]] && echo 12.srv")
    (work / "job.pbs").write_text(PBS_SCRIPT.replace("#PBS -l select", "#PBS -o out/\n#PBS -l select"))
    done = run("submit", "job.pbs")
    assert done.out == "12.srv\n"
    assert "PBS011" not in done.err


def test_without_the_scripts_scheduler_the_missing_command_is_named(
    work: Path, sbatch: Programs, run: Run
) -> None:
    (work / "job.pbs").write_text(PBS_SCRIPT)
    done = run("submit", "--profile", "generic_pbs", "job.pbs")
    assert (done.code, done.out) == (2, "")
    assert done.err.splitlines()[-1] == (
        "error: qsub was not found on the PATH; the script's #PBS lines are for PBS, which "
        "requires qsub. Run this on a login node of the cluster, or load the module that provides qsub."
    )


def test_a_refusal_is_reported_in_one_line(work: Path, programs: Programs, run: Run) -> None:
    refusal = (
        "sbatch: error: invalid partition specified: nosuch\nsbatch: error: Batch job submission failed: no\n"
    )
    programs.answers("sbatch", "", code=1, err=refusal)
    done = run("submit", *REQUEST)
    assert (done.code, done.out) == (2, "")
    assert done.err.splitlines()[-1] == (
        "error: sbatch rejected the job: invalid partition specified: nosuch; Batch job submission failed: no"
        ". No job was queued. Fix the request, and submit again."
    )
    assert not (work / "runs" / "ddp" / "submitted").exists()


@pytest.mark.parametrize("answer", ["", "Submitted!\n", "12 13\n", "$(touch x)\n", "-1\n"])
def test_an_answer_without_an_id_is_an_error_that_warns_of_a_second_job(
    work: Path, programs: Programs, run: Run, answer: str
) -> None:
    programs.answers("sbatch", answer)
    done = run("submit", *REQUEST)
    assert (done.code, done.out) == (1, "")
    assert "instead of a job ID. Check whether the job is queued before you try again." in done.err


def start(work: Path, programs: Programs, *args: str, stdout: int = subprocess.PIPE) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "ddp_hpc", "submit", *args]
    environ = {**clean_environ(), "PATH": str(programs.folder)}
    return subprocess.Popen(argv, cwd=work, env=environ, stdout=stdout, stderr=subprocess.PIPE, text=True)


def test_ctrl_c_waits_for_the_id_of_a_job_that_may_be_queued(work: Path, programs: Programs) -> None:
    programs.program("sbatch", "echo >up; until [[ -e go ]]; do sleep 0.02; done; echo 12")
    with start(work, programs, *REQUEST) as process:
        wait_for(work / "up")
        process.send_signal(signal.SIGINT)
        read_until(process, "waiting for sbatch, as the job may be queued already")
        (work / "go").touch()
        out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (130, "12\n")
    assert "job 12 was submitted; to cancel it: ddp-hpc cancel 12\n" in err
    assert json.loads((work / "runs" / "ddp" / "submitted").read_text())["job_id"] == "12"


def read_until(process: subprocess.Popen[str], words: str) -> None:
    assert process.stderr is not None
    assert any(words in line for line in process.stderr)


def wait_for(path: Path) -> None:
    end_s = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < end_s
        time.sleep(0.01)


@pytest.mark.check
def test_if_the_reader_of_the_output_exits_the_queued_jobs_are_reported(
    work: Path, programs: Programs
) -> None:
    programs.program("qsub", "echo 12.srv")
    (work / "job.pbs").write_text(f"{PBS_SCRIPT}{SUPERVISED}")
    reader, writer = os.pipe()
    os.close(reader)
    words = ("--profile", "generic_pbs", "job.pbs")
    with start(work, programs, *words, stdout=writer) as process:
        os.close(writer)
        _, err = process.communicate(timeout=20)
    assert process.returncode == 1
    said = (
        "cannot write to stdout (Broken pipe): job 12.srv was submitted; to cancel it: ddp-hpc cancel 12.srv"
    )
    assert err.splitlines()[-1] == said
    assert len(programs.called("qsub")) == 1


def test_the_account_in_the_environment_is_used_for_scripts_without_one(
    work: Path, sbatch: Programs, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DDP_HPC_ACCOUNT", "PROJECT")
    (work / "job.sh").write_text(SCRIPT)
    run("submit", "job.sh")
    run("submit", "job.sh", "--account", "OTHER")
    (work / "job.sh").write_text(SCRIPT.replace("#SBATCH --nodes", "#SBATCH -A mine\n#SBATCH --nodes"))
    run("submit", "job.sh")
    assert sbatch.called() == [
        "sbatch --parsable --account=PROJECT job.sh",
        "sbatch --parsable --account=OTHER job.sh",
        "sbatch --parsable job.sh",
    ]


def test_a_queued_job_is_reported_even_if_the_ledger_cannot_be_written(
    work: Path, sbatch: Programs, run: Run
) -> None:
    (work / "runs" / "ddp" / "submitted").mkdir(parents=True)
    done = run("submit", *REQUEST)
    assert (done.code, done.out) == (0, "12\n")
    assert "warning: job 12 is queued, but its submission could not be recorded: " in done.err


def test_a_run_directory_that_cannot_be_created_is_reported_before_the_submission(
    work: Path, sbatch: Programs, run: Run
) -> None:
    (work / "runs").write_text("a file")
    done = run("submit", *REQUEST)
    assert (done.code, done.out) == (1, "")
    assert "the job requires it; check the permissions of its parent directory" in done.err
    assert not sbatch.called()


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "nothing to submit; give a SCRIPT, or the options of ddp-hpc render"),
        (
            ["job.sh", "--launcher", "srun"],
            "job.sh cannot be combined with --launcher; change the directives of the script, or ",
        ),
        (["none.sh"], "none.sh does not exist. Give a job script."),
        (["pipe"], "pipe is not a regular file. Give a job script."),
        (["plain.sh"], "plain.sh is not a job script: it contains no #SBATCH or #PBS lines"),
        (
            ["--profile", "local"],
            "the scheduler of the profile is 'local', but jobs can only be submitted to slurm or pbs",
        ),
        (["--profile", "nosuch"], "unknown profile 'nosuch'"),
    ],
)
def test_an_invalid_request_is_one_line(
    work: Path, sbatch: Programs, run: Run, args: list[str], said: str
) -> None:
    (work / "job.sh").write_text(SCRIPT)
    (work / "plain.sh").write_text("#!/bin/bash\nhostname\n")
    os.mkfifo(work / "pipe")
    done = run("submit", *args)
    assert (done.code, done.out) == (2, "")
    assert said in done.err.splitlines()[-1]
    assert not sbatch.called()


def test_a_run_of_another_program_in_the_run_directory_is_refused(
    work: Path, sbatch: Programs, run: Run
) -> None:
    assert "warning: " not in run("submit", *REQUEST, "--", "python", "train.py", "--lr", "1").err
    write_state(work / "runs" / "train", RunState(State.REQUEUE, 90, "no time left"))
    again = run("submit", *REQUEST, "--walltime", "01:00:00", "--", "python", "train.py", "--lr", "1")
    assert "warning: " not in again.err, "the same program resumes its run"
    other = run("submit", *REQUEST, "--", "python", "train.py", "--lr", "2")
    assert (other.code, other.out) == (0, "12\n")
    assert (
        f"warning: {work}/runs/train contains the run of another command, python train.py --lr 1 (requeue, "
        "step 90), which this job would resume or overwrite; for a new run, choose another --name or "
        "--run-dir\n"
    ) in other.err
    done = run("submit", *REQUEST, "--name", "train", "--", "python", "other.py")
    assert (done.code, done.out) == (2, "")
    assert done.err.endswith(
        f"error: {work}/runs/train contains the run of another program, train.py, which other.py cannot "
        "resume and might overwrite; for a new run, choose another --name or --run-dir\n"
    )
    write_state(work / "runs" / "train", RunState(State.FAILED, 0, "exit code 1"))
    assert run("submit", *REQUEST, "--name", "train", "--", "python", "other.py").code == 0


def test_a_pending_job_of_another_program_in_the_run_directory_is_a_warning(
    work: Path, sbatch: Programs, run: Run
) -> None:
    run("submit", *REQUEST, "--name", "same", "--", "python", "first.py")
    done = run("submit", *REQUEST, "--name", "same", "--", "python", "second.py")
    assert "contains the run of another command, python first.py (job 12), which this job" in done.err
    assert "warning: " not in run("submit", *REQUEST, "--name", "new", "--", "python", "second.py").err


def test_a_complete_run_in_the_run_directory_is_a_warning(work: Path, sbatch: Programs, run: Run) -> None:
    script = work / "job.sh"
    script.write_text(run("render", *REQUEST).out)
    (work / "runs" / "ddp").mkdir(parents=True)
    write_state(work / "runs" / "ddp", RunState(State.DONE, 40, ""))
    done = run("submit", str(script), "--dry-run")
    assert (
        f"warning: the run in {work}/runs/ddp is complete (step 40); for a new run, change DDP_HPC_RUN_DIR "
        "in the script\n"
    ) in done.err


def test_json_describes_the_job(work: Path, programs: Programs, run: Run) -> None:
    programs.program("qsub", "echo 11.srv")
    run("render", "--profile", "generic_pbs", "-o", "job.pbs")
    done = run("submit", "--json", "job.pbs")
    assert json.loads(done.out) == {
        "job_id": "11.srv",
        "scheduler": "pbs",
        "script": f"{work}/job.pbs",
        "run_dir": f"{work}/runs/ddp",
        "work_dir": str(work),
    }
