"""How a job script uses `state` in the run directory: at its start, at its end, and on a signal. Under Slurm
here, with stand-ins for its commands; chains of real jobs under PBS are in tests/pbs/test_chain.py.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from ddp_hpc.base.run_outcomes import State
from ddp_hpc.base.run_state import RunState, write_state
from ddp_hpc.sites.site import load_site, profile_files
from tests.batch.conftest import Sandbox
from tests.batch.test_scripts_run import _wait_for, pbs, script, slurm

SAY = 'say() { echo "$*" >"$DDP_HPC_RUN_DIR/.s"; mv "$DDP_HPC_RUN_DIR/.s" "$DDP_HPC_RUN_DIR/state"; }\n'
# Records its arguments and environment.
COMMAND = '#!/bin/bash\necho "$*" >>"{record}"\nenv >"{record}.env"\necho "{says}"\nexit {code}\n'

REFUSED = (
    r"""printf '{"attempt": "%s", "cause": "refused", "exit_code": 2, "reason": "", "rank": 0, """
    r""""host": "", "step": null, "exception": ""}\n' "$DDP_HPC_THIS_ATTEMPT" >$DDP_HPC_RUN_DIR/end; """
)


@pytest.fixture
def job(sandbox: Sandbox) -> Sandbox:
    """A sandbox in which scontrol, sbatch and qsub succeed, and squeue knows no job step."""
    for name in ("scontrol", "sbatch", "qsub"):
        command(sandbox, name)
    command(sandbox, "squeue")
    return sandbox


def command(job: Sandbox, name: str, code: int = 0, says: str = "") -> None:
    job.program(name, COMMAND.format(record=f"{job.record}.{name}", code=code, says=says))


def folder(job: Sandbox, **files: str) -> Path:
    """The run directory with these files."""
    path = job.work / "runs" / "ddp"
    path.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (path / name).write_text(text)
        (path / name).chmod(0o644)
    return path


def run(
    job: Sandbox, then: str = "", command: tuple[str, ...] = ("python", "-m", "ddp_hpc.train"), **environ: str
) -> subprocess.CompletedProcess[bytes]:
    """Slurm job 7, whose srun runs the bash text `then`."""
    job.launcher("srun", then=SAY + then)
    environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": str(int(time.time()) + 3600), **environ}
    return job.run(script("generic_slurm", command=command), **slurm(job, 1, **environ))


def calls(job: Sandbox, name: str) -> list[str]:
    """The arguments of each call, except queries of Slurm's configuration and of the job."""
    path = Path(f"{job.record}.{name}")
    lines = path.read_text().splitlines() if path.exists() else []
    return [line for line in lines if not line.startswith(("show ", "--oneliner show "))]


def started(job: Sandbox) -> bool:
    return job.record.exists()


# At the end.


def test_a_training_without_a_final_state_is_not_done_although_its_launcher_exits_with_0(
    job: Sandbox,
) -> None:
    folder(job, state="requeue 60\n", attempts="1 6 0 1700000000\n")
    done = run(job, "exit 0", DDP_HPC_ATTEMPT="2")
    assert (done.returncode, calls(job, "scontrol")) == (1, [])
    said = "srun exited with code 0, but the training has not written its final state; look for the cause"
    assert f"error: {said}" in done.stderr.decode()
    assert (folder(job) / "state").read_text().startswith(f"failed 60 {said}")


def test_the_state_requeue_requeues_the_same_job(job: Sandbox) -> None:
    done = run(job, "say requeue 3 no time left")
    assert calls(job, "scontrol") == ["requeue 7"]
    assert calls(job, "sbatch") == []
    assert done.stdout.decode().endswith(
        "ddp-hpc: stopped at step 3: no time left; this job is requeued, and attempt 2 resumes the run\n"
    )


def test_an_unchanged_state_that_was_written_again_belongs_to_this_attempt(job: Sandbox) -> None:
    """The file is replaced, so its inode differs although its text does not."""
    folder(job, state="requeue 3\n")
    done = run(job, "say requeue 3")
    assert done.returncode == 1
    assert b"made no progress" in done.stderr


def test_a_refused_start_does_not_count_as_an_attempt(job: Sandbox) -> None:
    """For example, the mom of another attempt has died, but its ranks are alive and hold the lock."""
    runs = folder(job, attempts="1 7 0 1000\n", state="running 10\n")
    done = run(job, f"{REFUSED}say running 20; exit 1")
    assert done.returncode == 2
    assert b"ddp-hpc: the ranks refused to start, so this start does not count as an attempt" in done.stdout
    assert b"the run is at step 20\n" in done.stdout
    assert (calls(job, "scontrol"), calls(job, "sbatch")) == ([], [])
    assert (runs / "attempts").read_text() == "1 7 0 1000\n"


def test_if_requeue_fails_a_new_job_is_submitted_without_the_variables_of_the_old_one(
    job: Sandbox,
) -> None:
    command(job, "scontrol", code=1)
    old = {"SLURM_PROCID": "0", "PMI_RANK": "0", "PALS_RANKID": "0", "RANK": "0", "LOCAL_RANK": "0"}
    old |= {"WORLD_SIZE": "2", "MASTER_ADDR": "old", "CUDA_VISIBLE_DEVICES": "0"}
    kept = {"SLURM_CONF": "/etc/slurm.conf", "LD_LIBRARY_PATH": "/opt/lib"}
    given = {"SLURM_JOB_ACCOUNT": "proj", "SLURM_JOB_PARTITION": "gpu"}
    assert run(job, "say requeue 3", **old, **kept, **given).returncode == 75
    copy = folder(job) / "job.sh"
    options = "--dependency=afterany:7 --partition=gpu --account=proj"
    assert calls(job, "sbatch") == [f"{options} {copy}"]
    assert copy.read_text() == (job.folder / "job.sh").read_text()
    seen = dict(line.partition("=")[::2] for line in calls(job, "sbatch.env"))
    assert not {name for name in seen if name.startswith(("SLURM_", "PMI", "PALS", "MASTER_"))} - {
        "SLURM_CONF"
    }
    assert not set(old) & set(seen)
    assert seen | kept | {"DDP_HPC_ATTEMPT": "2"} == seen


def test_a_job_that_slurm_has_already_requeued_is_not_submitted_again(job: Sandbox) -> None:
    command(job, "scontrol", code=1, says="Job is pending execution for job 7")
    assert run(job, "say requeue 3").returncode == 75
    assert calls(job, "sbatch") == []


def test_if_nothing_can_be_submitted_the_resume_command_is_printed(job: Sandbox) -> None:
    for name in ("scontrol", "sbatch"):
        command(job, name, code=1)
    done = run(job, "say requeue 3")
    assert done.returncode == 75
    last = done.stderr.decode().splitlines()[-1]
    assert (
        last
        == "error: stopped at step 3, and no successor could be queued: sbatch failed: no message, exit code "
        + f"1; to resume: cd {job.work} && "
        + (f"sbatch {job.work}/runs/ddp/job.sh")
    )


# At the start.


def test_the_run_of_another_program_is_not_overwritten(job: Sandbox) -> None:
    run_dir = folder(job)
    (run_dir / "job.sh").write_text(script("generic_slurm", command=("python", "other.py")))
    write_state(run_dir, RunState(State.REQUEUE, 90, "no time left"))
    done = run(job)
    assert (done.returncode, started(job)) == (2, False)
    assert done.stderr.decode().splitlines()[-1] == (
        f"error: {run_dir} contains the run of another program, other.py, which ddp_hpc.train cannot resume "
        "and might overwrite; set DDP_HPC_RUN_DIR in the script to another directory (ddp-hpc render --name "
        "or --run-dir)"
    )
    write_state(run_dir, RunState(State.FAILED, 0, "exit code 1"))
    run(job)
    assert started(job), "a run that failed without a snapshot leaves nothing to protect"


def test_each_start_is_recorded_with_its_first_step(job: Sandbox) -> None:
    folder(job, state="requeue 3\n", attempts="1 7 0 1700000000\n")
    run(job, "say done 9")
    *_, line = (folder(job) / "attempts").read_text().splitlines()
    assert line.split()[:3] == ["2", "7", "3"]
    assert int(line.split()[3]) > 1700000000


def test_a_script_that_becomes_writable_for_others_is_not_submitted(job: Sandbox) -> None:
    done = run(job, "say requeue 5; chmod o+w $DDP_HPC_RUN_DIR/job.sh")
    assert (done.returncode, calls(job, "scontrol"), calls(job, "sbatch")) == (2, [], [])


def test_the_files_of_the_script_are_not_writable_for_others_with_any_umask(job: Sandbox) -> None:
    old = os.umask(0)
    try:
        run(job, "say requeue 5; chmod go-w $DDP_HPC_RUN_DIR/state")
        write_state(folder(job), RunState(State.REQUEUE, 5, ""))
    finally:
        os.umask(old)
    modes = {path.name: path.stat().st_mode & 0o022 for path in folder(job).iterdir()}
    assert modes == {"state": 0, "attempts": 0, "job.sh": 0, "timeline": 0}


# Signals.

# Ranks that stop on either signal and write its name to `state`.
STOPS = """trap 'say requeue 3 TERM; exit 1' TERM
trap 'say requeue 3 USR1; exit 1' USR1
echo $$ >rank.tmp; mv rank.tmp rank
while :; do sleep 0.05; done"""


@contextmanager
def running(job: Sandbox, text: str, environ: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """The script after its ranks have started. All its processes are killed at the end."""
    process = subprocess.Popen(
        ["bash", job.write(text)],
        cwd=job.work,
        env=job.environ(**environ),
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        _wait_for(job.work / "rank")
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.mark.parametrize(
    ("sent", "left_s", "goes_on"),
    [
        (signal.SIGTERM, 3600, False),  # scancel, qdel, preemption
        (signal.SIGTERM, 5, True),  # the walltime
        (signal.SIGUSR1, 3600, True),  # sbatch --signal=B:USR1@600
    ],
)
def test_signals_reach_the_ranks_and_only_an_early_term_prevents_the_requeue(
    job: Sandbox, sent: signal.Signals, left_s: int, goes_on: bool
) -> None:
    name = sent.name.removeprefix("SIG")
    job.launcher("srun", then=SAY + STOPS)
    job.program("scancel", '#!/bin/bash\nkill "-${1#--signal=}" "$(cat rank)"\n')
    end_s = int(time.time()) + left_s
    environ = slurm(job, 1, SLURM_JOB_ID="7", SLURM_JOB_END_TIME=str(end_s))
    with running(job, script("generic_slurm"), environ) as process:
        process.send_signal(sent)
        said = process.communicate(timeout=20)[0]
        assert process.returncode == 75
    assert (folder(job) / "state").read_text() == f"requeue 3 {name}\n"
    assert calls(job, "scontrol") == (["requeue 7"] if goes_on else [])
    assert (
        "before the end of its walltime, so no other job is submitted; to resume: cd " in said
    ) is not goes_on


def test_the_signal_from_the_requeue_itself_is_ignored(job: Sandbox) -> None:
    command(job, "scancel")
    job.program("scontrol", f'#!/bin/bash\nkill -TERM "$(<{job.work}/script)"; sleep 0.2\n')
    done = run(job, "echo $PPID >script; say requeue 3")
    assert done.returncode == 75
    assert done.stdout.decode().endswith("this job is requeued, and attempt 2 resumes the run\n")
    assert calls(job, "scancel") == []


# Differences of PBS.


def test_usr1_becomes_term_for_launchers_that_do_not_forward_usr1(job: Sandbox) -> None:
    job.launcher("mpiexec", version="PALS", then=SAY + STOPS)
    with running(job, script("generic_pbs"), pbs(job, "a")) as process:
        process.send_signal(signal.SIGUSR1)
        process.communicate(timeout=20)
        assert process.returncode == 75
    assert (folder(job) / "state").read_text() == "requeue 3 TERM\n"
    assert len(calls(job, "qsub")) == 1  # a warning does not prevent the successor


def run_pbs(job: Sandbox, profile: str, **environ: str) -> subprocess.CompletedProcess[bytes]:
    """PBS job 12, which stops at step 3."""
    launcher = SAY + "say requeue 3"
    job.launcher("mpiexec", version="PALS", then=launcher)
    return job.run(script(profile), **pbs(job, "a", **environ))


def test_the_successor_is_submitted_to_the_requested_queue_and_not_to_the_routed_one(job: Sandbox) -> None:
    run_pbs(job, "polaris", PBS_QUEUE="small", PBS_O_QUEUE="prod", PBS_ACCOUNT="proj")
    (words,) = calls(job, "qsub")
    copy = folder(job) / "job.sh"
    assert words == f"-A proj -q prod -W depend=afterany:12.pbs-srv -v DDP_HPC_ATTEMPT=2 {copy}"


@pytest.mark.parametrize(
    ("profile", "given", "server_says", "words"),
    [
        ("polaris", "-Aproj", "Account_Name = proj", "-A proj"),
        ("aspire2a", "", "project = _pbs_project_default", ""),
        ("miyabi_g", "-W group_list=g1", "group_list = g1", "-W group_list=g1"),
    ],
)
def test_the_account_of_qsubs_command_line_is_passed_on(
    job: Sandbox, profile: str, given: str, server_says: str, words: str
) -> None:
    """An account in the script's directives applies to the successor, too."""
    says = f"Job Id: 12.pbs-srv\n    {server_says}\n    Submit_arguments = {given} job.sh\n"
    command(job, "qstat", says=f"{says}    Resource_List.walltime = 01:00:00")
    run_pbs(job, profile, PBS_O_QUEUE="q", PBS_ACCOUNT="not this")
    assert calls(job, "qstat")[0] == "-f 12.pbs-srv"
    (said,) = calls(job, "qsub")
    assert said.split(" -q q ")[0] == words if words else said.startswith("-q q ")


def test_variables_that_the_site_requires_are_passed_to_the_successor(job: Sandbox) -> None:
    """A -v on the command line of qsub replaces the one in the script."""
    text = script("abci3")
    assert "#PBS -v USE_SSH=1\n" in text
    job.launcher("mpiexec", version="Open MPI", then=SAY + "say requeue 3")
    # This file of the site does not exist on this machine.
    job.run(text.replace("source /etc/profile.d/modules.sh", ""), **pbs(job, "a"))
    (said,) = calls(job, "qsub")
    # Hooks of the site read the variable, so it is not sufficient that the script sets it.
    assert " -v USE_SSH=1,DDP_HPC_ATTEMPT=2 " in said


def test_if_compute_nodes_cannot_submit_the_command_is_printed(
    job: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    profile = tmp_path / "config" / "ddp-hpc" / "profiles" / "strict.toml"
    profile.parent.mkdir(parents=True)
    text = profile_files()["generic_pbs"].read_text()
    profile.write_text(text.replace("[pbs]\n", "[pbs]\nsubmit_from_nodes = false\n"))
    assert not load_site("strict").pbs.submit_from_nodes
    done = run_pbs(job, "strict")
    assert (done.returncode, calls(job, "qsub")) == (75, [])
    last = done.stdout.decode().splitlines()[-1]
    assert last.endswith(f"on a login node: cd {job.work} && ddp-hpc submit {job.work}/runs/ddp/job.sh")
