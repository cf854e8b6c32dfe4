"""Jobs of LSF in a rehearsal. The stand-in was built from IBM's manual and never compared with a real LSF."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rehearse.conftest import Rehearse

TRAIN = [
    "--",
    "python",
    "-m",
    "ddp_hpc.train",
    "--model",
    "linear",
    "--num-samples",
    "128",
    "--batch-size",
    "8",
]


def render(path: Path, *words: str) -> Path:
    argv = [sys.executable, "-m", "ddp_hpc", "render", "--profile", "generic_lsf", "-o", str(path), *words]
    subprocess.run(argv, check=True, capture_output=True)
    return path


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(["#!/bin/bash", *lines, ""]))
    return path


def test_the_generic_job_trains_on_two_nodes(rehearse: Rehearse, tmp_path: Path) -> None:
    script = render(tmp_path / "job.sh", "--nodes", "2", "--ranks-per-node", "2", *TRAIN)
    done = rehearse(script, "--ranks-per-node", "1", timeout_s=120.0)
    assert done.exit_code == 0, done.stdout + done.stderr
    assert "LSF is simulated with 2 nodes" in done.stderr
    assert re.search(r"^ddp-hpc: job [0-9]+: .*mpiexec -n 4 ", done.stdout, re.MULTILINE)
    assert re.search(r"^done: 3 steps", done.stdout, re.MULTILINE)
    assert "Successfully completed." in done.stdout


def test_ranks_under_jsrun_have_the_variables_of_the_job_step_manager(
    rehearse: Rehearse, tmp_path: Path
) -> None:
    script = render(
        tmp_path / "job.sh", "--nodes", "2", "--launcher", "jsrun", *TRAIN, "--discovery", "jsrun"
    )
    done = rehearse(script, "--ranks-per-node", "1", timeout_s=120.0)
    assert done.exit_code == 0, done.stdout + done.stderr
    assert re.search(r"^world: 2 ranks on 1 node \(jsrun\), gloo on cpu", done.stdout, re.MULTILINE)


def test_a_run_resumes_in_a_successor_after_its_run_limit(rehearse: Rehearse, tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text('extends = "generic_lsf"\nkill_delay_s = 1\n')  # the trainer stops so much earlier
    words = ["--profile", str(own), "--walltime", "00:10:00", *TRAIN, "--epochs", "9999999"]
    script = render(tmp_path / "job.sh", *words)
    done = rehearse(script, "--walltime-s", "25", "--max-jobs", "2", "--ranks-per-node", "1", timeout_s=150.0)
    assert done.exit_code == 75, done.stdout + done.stderr
    numbers = re.findall(r"^rehearse: job (\d+)", done.stderr, re.MULTILINE)
    assert numbers == [str(int(numbers[0]) + i) for i in range(3)]
    assert f"rehearse: job {numbers[2]} was not started, because --max-jobs 2 was reached" in done.stderr
    assert re.search("^ddp-hpc: attempt 2 of at most 20", done.stdout, re.MULTILINE)
    assert re.search("^ddp-hpc: stopped at .*attempt 3", done.stdout, re.MULTILINE)


def test_a_script_finds_the_variables_of_lsf(rehearse: Rehearse, tmp_path: Path) -> None:
    script = write(
        tmp_path / "job.sh",
        "#BSUB -W 5",
        "#BSUB -n 4",
        'echo "$LSB_MCPU_HOSTS; $(sort -u "$LSB_DJOB_HOSTFILE" | xargs); $LSB_PROJECT_NAME; $LSB_QUEUE"',
        "#BSUB -R span[ptile=2] -P abc",
    )
    done = rehearse(script)
    assert done.exit_code == 0, done.stderr
    assert "node1 2 node2 2; node1 node2; abc; normal\n" in done.stdout


def test_the_job_commands_understand_the_stand_in(rehearse: Rehearse, tmp_path: Path) -> None:
    deadline = (
        "import os, time; from ddp_hpc.schedulers.deadline import find_deadline as find; "
        "end = find(os.environ); print(end.source, round((end.at_s - time.time()) / 60))"
    )
    script = write(
        tmp_path / "job.sh",
        "#BSUB -W 5 -J train -o train-%J.log",
        'python -m ddp_hpc status "$LSB_JOBID"',
        f'python -c "{deadline}"',
        'python -m ddp_hpc cancel "$LSB_JOBID" --only',
        "sleep 60",
    )
    done = rehearse(script)
    assert "running" in done.stdout
    assert re.search(r"train-\d+\.log", done.stdout)
    assert "\nbjobs 5\n" in done.stdout
    assert "TERM_OWNER: job killed by owner" in done.stderr


def test_whole_nodes_have_a_launch_node_in_front(rehearse: Rehearse, tmp_path: Path) -> None:
    script = write(tmp_path / "job.sh", "#BSUB -W 5", "#BSUB -nnodes 2", 'xargs <"$LSB_DJOB_HOSTFILE"')
    assert rehearse(script).stdout == "batch1 node1 node2\n"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("#BSUB -W 24:00:00", "24:00:00: Bad RUNLIMIT specification. Job not submitted."),
        ("#BSUB --nodes 2", "--nodes: Illegal option. Job not submitted."),
        ("#BSUB -w ended(99)", "ended(99): No matching job found. Job not submitted."),
        ("#BSUB -n 0", "Bad argument for option -n. Job not submitted."),
    ],
)
def test_what_bsub_rejects_is_refused_with_its_message(
    rehearse: Rehearse, tmp_path: Path, line: str, said: str
) -> None:
    done = rehearse(write(tmp_path / "job.sh", line, "date"))
    assert done.exit_code == 2
    assert said in done.stderr


def test_at_the_run_limit_usr2_comes_before_the_end(rehearse: Rehearse, tmp_path: Path) -> None:
    script = write(
        tmp_path / "job.sh", "#BSUB -W 5", "trap 'echo warned; exit 3' USR2", "sleep 60 & wait $!", "sleep 60"
    )
    done = rehearse(script, "--walltime-s", "2")
    assert done.exit_code == 1
    assert "warned\n" in done.stdout
    assert "EXIT, exit code 3 (TERM_RUNLIMIT: job killed after reaching LSF run time limit)" in done.stderr


@pytest.mark.parametrize(("slots", "signals"), [(1, ["INT", "TERM"]), (2, [])])
def test_bkill_sends_only_sigkill_to_a_parallel_job(
    rehearse: Rehearse, tmp_path: Path, slots: int, signals: list[str]
) -> None:
    script = write(
        tmp_path / "job.sh",
        f"#BSUB -W 5 -n {slots}",
        "trap 'echo INT' INT; trap 'echo TERM; exit 4' TERM",
        'bkill "$LSB_JOBID"',
        "for i in {1..600}; do sleep 0.1; done",
    )
    done = rehearse(script, timeout_s=60.0)
    assert re.findall("^(INT|TERM)$", done.stdout, re.MULTILINE) == signals
    assert "TERM_OWNER: job killed by owner" in done.stderr
