"""Jobs that the scheduler ends at their walltime, and their successors."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Launch
from tests.rehearse.conftest import Rehearse

Script = Callable[..., Path]

# With 3 s, an attempt was sometimes not at its trap yet, or had not ended, on a machine with other work.
WALLTIME_S = "10"
# Writes `state` as the trainer does. A signal stops the first attempt; the second one completes the run.
TRAINER = """#!/bin/bash
say() { echo "$*" >"$DDP_HPC_RUN_DIR/.state"; mv "$DDP_HPC_RUN_DIR/.state" "$DDP_HPC_RUN_DIR/state"; }
read -r _ step _ <"$DDP_HPC_RUN_DIR/state" 2>/dev/null || step=0
if ((step)); then say done 20; exit 0; fi
say running 0
trap 'say requeue 10 SIGTERM; exit 75' TERM
while :; do sleep 0.05; done
"""


def rendered(launch: Launch, tmp_path: Path, profile: str) -> Path:
    """The script that `ddp-hpc render` writes for TRAINER."""
    trainer, job = tmp_path / "trainer.sh", tmp_path / "job.sh"
    trainer.write_text(TRAINER)
    words = ["--profile", profile, "--ranks-per-node", "1", "--walltime", "01:00:00", "-o", job]
    done = launch(["python", "-m", "ddp_hpc", "render", *words, "--", "bash", trainer])
    assert done.exit_code == 0, done.stderr
    return job


def fast(tmp_path: Path, scheduler: str) -> list[str | Path]:
    """A site that kills a second after SIGTERM."""
    site = tmp_path / "fast.toml"
    site.write_text(f'extends = "generic_{scheduler}"\nchecked = "2026-11-21"\nkill_delay_s = 1\n')
    return ["--profile", site]


@pytest.mark.check
def test_a_run_on_pbs_is_resumed_in_a_successor_that_it_submits(
    rehearse: Rehearse, launch: Launch, tmp_path: Path
) -> None:
    done = rehearse(rendered(launch, tmp_path, "generic_pbs"), "--walltime-s", WALLTIME_S)
    assert done.exit_code == 0, done.stdout + done.stderr
    assert re.search(
        rf"=>> PBS: job killed: walltime \d+ exceeded limit {WALLTIME_S}$", done.stdout, re.MULTILINE
    )
    assert "stopped at step 10: SIGTERM; attempt 2 resumes the run" in done.stdout
    assert "ddp-hpc: attempt 2 of at most 20, from step 10" in done.stdout
    first, second = re.findall(r"job (\d+).rehearsal: (.*)", done.stderr)
    assert int(second[0]) == int(first[0]) + 1
    assert (first[1], second[1]) == (
        "Exit_status -29 (exceeded resource walltime)",
        "Exit_status 0 (finished)",
    )


def test_a_run_on_slurm_is_resumed_in_the_same_job(
    rehearse: Rehearse, launch: Launch, tmp_path: Path
) -> None:
    done = rehearse(rendered(launch, tmp_path, "generic_slurm"), "--walltime-s", WALLTIME_S)
    assert done.exit_code == 0, done.stdout + done.stderr
    assert "DUE TO TIME LIMIT" in done.stdout
    assert "stopped at step 10: SIGTERM; this job is requeued, and attempt 2 resumes the run" in done.stdout
    assert ": COMPLETED, ExitCode 0:0, started 2 times" in done.stderr


@pytest.mark.check
def test_at_most_max_jobs_are_run(rehearse: Rehearse, launch: Launch, tmp_path: Path) -> None:
    done = rehearse(rendered(launch, tmp_path, "generic_pbs"), "--walltime-s", WALLTIME_S, "--max-jobs", "1")
    assert re.search(r"job \d+.rehearsal was not started, because --max-jobs 1 was reached", done.stderr)
    assert "attempt 2 of" not in done.stdout


@pytest.mark.check
def test_a_script_that_ignores_sigterm_is_killed_after_the_sites_delay(
    rehearse: Rehearse, script: Script, tmp_path: Path
) -> None:
    job = script("pbs", "-l select=1", "-j oe", "trap '' TERM", "while :; do sleep 0.1; done")
    done = rehearse(job, *fast(tmp_path, "pbs"), "--walltime-s", "1", timeout_s=20.0)
    assert done.exit_code == 1
    assert "Exit_status -29" in done.stderr
    job = script("slurm", "--nodes=1", "trap '' TERM", "while :; do sleep 0.1; done")
    done = rehearse(job, *fast(tmp_path, "slurm"), "--walltime-s", "1", timeout_s=20.0)
    assert done.exit_code == 1
    assert "TIMEOUT, ExitCode 0:9" in done.stderr


@pytest.mark.check
@pytest.mark.parametrize(
    ("option", "told"),
    [("B:USR1@1", ["shell"]), ("USR1@1", ["rank 0", "rank 1"])],
    ids=["batch shell", "steps"],
)
def test_the_signal_before_the_end_reaches_the_batch_shell_or_the_steps(
    rehearse: Rehearse, script: Script, tmp_path: Path, option: str, told: list[str]
) -> None:
    rank = tmp_path / "rank.sh"
    rank.write_text(
        "trap 'echo rank $SLURM_PROCID; exit 0' USR1; for ((i = 0; i < 80; i++)); do sleep 0.1; done"
    )
    lines = ["--nodes=2", f"--signal={option}", "trap 'echo shell' USR1", f"srun bash {rank} &"]
    done = rehearse(script("slurm", *lines, "wait", "wait"), "--walltime-s", "5")
    assert sorted(re.findall(r"^(?:shell|rank \d)$", done.stdout, re.MULTILINE)) == told


@pytest.mark.check
def test_a_requeued_job_has_its_restart_count(rehearse: Rehearse, script: Script) -> None:
    lines = ['echo "count ${SLURM_RESTART_COUNT-none}"', "scontrol requeue $SLURM_JOB_ID", "sleep 9"]
    job = script("slurm", "--nodes=1", "--open-mode=append", "--requeue", *lines)
    done = rehearse(job, "--max-jobs", "2")
    assert re.findall("count (.*)", done.stdout) == ["none", "1"]
    assert "DUE TO JOB REQUEUE" in done.stdout
    assert done.exit_code == 75


@pytest.mark.check
def test_a_job_without_requeue_is_not_requeued(rehearse: Rehearse, script: Script) -> None:
    job = script("slurm", "--nodes=1", "--no-requeue", "scontrol requeue $SLURM_JOB_ID")
    done = rehearse(job)
    assert "Requested operation is presently disabled for job" in done.stdout
    assert done.exit_code == 1


@pytest.mark.check
def test_a_job_that_does_not_end_is_killed_at_the_time_limit(rehearse: Rehearse, script: Script) -> None:
    for scheduler, asks in (("pbs", "-l select=1"), ("slurm", "--nodes=1"), ("", "")):
        done = rehearse(script(scheduler, asks, "sleep 60"), "--limit-s", "1", timeout_s=20.0)
        assert done.exit_code == 1
        assert "stopped after 1 s (--limit-s)" in done.stderr
