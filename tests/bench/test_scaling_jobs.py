"""`ddp-hpc bench scaling --submit` and `--gather`, with schedulers' commands that say what they are told."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.bench.scaling_points import STEPS, WARM_UP, write_point
from tests.conftest import clean_environ
from tests.queue.answers import pbs, slurm
from tests.queue.conftest import Programs, Run, no_pauses, nothing_set, programs, run, work

__all__ = ["no_pauses", "nothing_set", "programs", "run", "work"]

SITE = ["--profile", "generic_slurm", "--gpus-per-node", "4", "--walltime", "00:10:00"]
SHORT = ["--steps", str(STEPS), "--warm-up", str(WARM_UP), "--batch-size", "8", "--mode", "weak"]
FOUR, EIGHT = "ranks4-batch8", "ranks8-batch8"


def scaling(run: Run, *args: str) -> Any:
    return run("bench", "scaling", "--submit", *SITE, *SHORT, *args)


@pytest.fixture
def cluster(work: Path, programs: Programs) -> Programs:
    """Ids count up from 12; scontrol says of a job what its file in `jobs` does, and knows no others."""
    (work / "jobs").mkdir()
    programs.program(
        "sbatch",
        f'mapfile -t calls <"{programs.calls}"; n=11; for c in "${{calls[@]}}"; do '
        '[[ $c != sbatch* ]] || n=$((n + 1)); done; echo "$n"',
    )
    programs.program(
        "scontrol",
        f'cat "{work}/jobs/${{!#}}" 2>/dev/null || {{ echo "slurm_load_jobs error: Invalid job id '
        'specified" >&2; exit 1; }',
    )
    return programs


def tell(work: Path, job_id: str, **changes: str) -> None:
    """What the scheduler says of a job from now on."""
    (work / "jobs" / job_id).write_text(slurm(job_id=job_id, work=str(work), log=f"{work}/log", **changes))


def test_a_dry_run_is_what_render_writes_for_each_point(work: Path, programs: Programs, run: Run) -> None:
    done = scaling(run, "--nodes", "1,2", "--trace-steps", "3", "--dry-run", "--", "--amp", "bf16")
    assert done.code == 0, done.err
    rendered, commands = "", []
    for nodes, name in (("1", FOUR), ("2", EIGHT)):
        ranks, folder = 4 * int(nodes), f"scaling/{name}"
        training = ["--amp", "bf16", "--num-samples", "2048", "--batch-size", "8"]
        training += ["--max-steps", "10", "--epochs", "10", "--no-snapshots"]
        training += ["--metrics", f"{folder}/metrics.jsonl", "--summary", f"{folder}/summary.json"]
        training += ["--trace-dir", f"{folder}/trace", "--trace-window", "6,1,3,1", "--trace-ranks", "all"]
        request = [*SITE, "--nodes", nodes, "--ranks-per-node", "4", "--name", f"ddp-{ranks}x8"]
        request += ["--run-dir", folder, "--", "python", "-m", "ddp_hpc.train", *training]
        rendered += run("render", *request).out
        commands.append(f"would run: sbatch --parsable {work}/{folder}/job-")
    assert done.out == rendered
    said = [line for line in done.err.splitlines() if line.startswith("would run: ")]
    assert [line[: -len("01234567.sh")] for line in said] == commands
    assert not list(work.iterdir())


def test_ranks_fill_a_node_before_the_next(work: Path, programs: Programs, run: Run) -> None:
    done = scaling(run, "--ranks", "1,4,16", "--dry-run")
    lines = [
        line for line in done.out.splitlines() if line.startswith(("#SBATCH --nodes", "#SBATCH --ntasks"))
    ]
    assert [line.rpartition("=")[2] for line in lines] == ["1", "1", "1", "4", "4", "4"]
    done = scaling(run, "--ranks", "1,4,6", "--dry-run")
    assert (done.code, done.out) == (2, "")
    assert "--ranks 6: a node has 4 ranks, and 6 do not fill nodes" in done.err


def test_many_ranks_leave_the_traces_of_some(work: Path, programs: Programs, run: Run) -> None:
    done = scaling(run, "--nodes", "4", "--dry-run")
    assert "--trace-ranks 0,1,2,3,4,5,6,7 " in done.out


def test_each_point_is_a_job_and_ids_alone_are_printed(work: Path, cluster: Programs, run: Run) -> None:
    done = scaling(run, "--nodes", "1,2")
    assert (done.code, done.out) == (0, "12\n13\n"), done.err
    assert "4 ranks, batches of 8: job 12\n8 ranks, batches of 8: job 13\n" in done.err
    for name, job_id in ((FOUR, "12"), (EIGHT, "13")):
        folder = work / "scaling" / name
        [script] = folder.glob("job-*.sh")
        assert f"sbatch --parsable {script}" in cluster.called("sbatch")
        assert json.loads((folder / "submitted").read_text())["job_id"] == job_id


def test_what_waits_runs_or_is_done_is_not_queued_again(work: Path, cluster: Programs, run: Run) -> None:
    assert scaling(run, "--nodes", "1,2,4").code == 0
    tell(work, "12", state="COMPLETED")
    write_point(work / "scaling" / FOUR, 4, 8, 0.5)
    tell(work, "13", state="PENDING", reason="Priority")
    tell(work, "14", state="FAILED", exit="1:0")
    done = scaling(run, "--nodes", "1,2,4")
    assert (done.code, done.out) == (0, "15\n"), done.err
    assert (
        "4 ranks, batches of 8: 64.0 samples/s\n8 ranks, batches of 8: waiting, job 13: PENDING, P"
        in done.err
    )
    tell(work, "15")
    done = scaling(run, "--nodes", "1,2,4")
    assert (done.code, done.out) == (0, "")
    assert "nothing is left to submit" in done.err


def test_gathering_names_what_is_not_done(work: Path, cluster: Programs, run: Run) -> None:
    scaling(run, "--nodes", "1,2,4")
    tell(work, "12", state="COMPLETED")
    write_point(work / "scaling" / FOUR, 4, 8, 0.5)
    tell(work, "13", state="RUNNING")
    tell(work, "14", state="PENDING", reason="Resources")
    done = run("bench", "scaling", "--gather")
    assert done.code == 75
    assert [line.split()[:2] for line in done.out.splitlines()[1:]] == [["weak", "4"]]
    assert done.err.splitlines()[1:] == [
        "8 ranks, batches of 8: running, job 13: RUNNING",
        "16 ranks, batches of 8: waiting, job 14: PENDING, Resources",
    ]
    (work / "log").write_text("[rank 3/8 n1] error: out of luck; try another\n")
    tell(work, "13", state="FAILED", exit="1:0")
    (work / "jobs" / "14").unlink()
    done = run("bench", "scaling", "--gather")
    assert done.code == 1
    assert done.err.splitlines()[1:] == [
        "8 ranks, batches of 8: failed, job 13: exit code 1: "
        "[rank 3/8 n1] error: out of luck; try another; see ddp-hpc status 13",
        "16 ranks, batches of 8: failed, job 14 is not known here any more; it left no summary",
    ]


def test_waiting_ends_with_the_last_job(
    work: Path, cluster: Programs, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ddp_hpc.commands.scaling import command

    scaling(run, "--nodes", "1,2")
    tell(work, "12")
    tell(work, "13")
    paused = []

    def pause(seconds: float) -> None:
        paused.append(seconds)
        write_point(work / "scaling" / (FOUR if len(paused) == 1 else EIGHT), 4 * len(paused), 8, 0.5)

    monkeypatch.setattr(command, "sleep", pause)
    done = run("bench", "scaling", "--gather", "--wait")
    assert done.code == 0
    assert paused == [2, 3]
    assert done.err.splitlines()[:3] == [
        "waiting for 2 of 2 points",
        "4 ranks, batches of 8: 64.0 samples/s",
        "8 ranks, batches of 8: 128.0 samples/s",
    ]
    assert len(done.out.splitlines()) == 3


def test_a_scheduler_that_does_not_answer_queues_nothing_twice(
    work: Path, cluster: Programs, run: Run
) -> None:
    scaling(run, "--nodes", "1")
    cluster.answers("scontrol", "", code=1, err="slurm_load_jobs error: Unable to contact slurm controller\n")
    done = scaling(run, "--nodes", "1")
    assert (done.code, done.out) == (1, "")
    assert len(cluster.called("sbatch")) == 1
    done = run("bench", "scaling", "--gather")
    assert (done.code, done.out) == (75, "")
    assert "waiting, job 12, and its scheduler does not answer: scontrol was tried 3 times" in done.err


def test_a_refusal_half_way_says_what_is_queued(work: Path, cluster: Programs, run: Run) -> None:
    refuses = 'echo "sbatch: error: no" >&2; exit 1'
    cluster.program("sbatch", f"if [[ $* == *{EIGHT}* ]]; then {refuses}; fi; echo 12")
    done = scaling(run, "--nodes", "1,2")
    assert (done.code, done.out) == (1, "12\n")
    said = "error: 8 ranks, batches of 8: 1 of 2 jobs are queued; the same command goes on with the others: "
    assert said in done.err.splitlines()[-1]


def test_what_a_failed_job_has_left_is_gone_before_the_next(work: Path, cluster: Programs, run: Run) -> None:
    scaling(run, "--nodes", "1")
    write_point(work / "scaling" / FOUR, 4, 8, 0.5, {"stopped": "SIGTERM"})
    tell(work, "12", state="COMPLETED")
    assert scaling(run, "--nodes", "1").out == "13\n"
    assert not (work / "scaling" / FOUR / "summary.json").exists()


def test_points_are_jobs_of_pbs_too(work: Path, programs: Programs, run: Run) -> None:
    programs.answers("qsub", "12.pbs-srv\n")
    programs.answers("qstat", json.dumps(pbs(job_state="Q", comment="Not Running: no nodes", Job_Name="ddp")))
    request = ["--submit", "--profile", "polaris", "--queue", "debug", "--walltime", "00:10:00", *SHORT]
    done = run("bench", "scaling", *request, "--nodes", "1", "--account", "P")
    assert (done.code, done.out) == (0, "12.pbs-srv\n"), done.err
    done = run("bench", "scaling", "--gather")
    assert (done.code, done.out) == (75, "")
    assert done.err == "4 ranks, batches of 8: waiting, job 12.pbs-srv: Q, Not Running: no nodes\n"


def test_a_machine_without_the_scheduler_gets_no_folder(work: Path, programs: Programs, run: Run) -> None:
    done = scaling(run, "--nodes", "1")
    assert (done.code, done.out) == (2, "")
    assert "sbatch was looked for on the PATH and is not there; the jobs are for Slurm" in done.err
    assert not list(work.iterdir())


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "--submit was given; say how large the jobs are: --nodes 1,2,4 or --ranks 1,2,4"),
        (["--nodes", "1", "--json", "s.json"], "--json goes with --gather, when the jobs are done"),
        (["--nodes", "1", "--setup", "for"], "--setup: bash does not understand"),
        (["--nodes", "1", "--launcher", "srunn"], 'did you mean "srun"?'),
        (["--nodes", "1", "--walltime", "soon"], "soon"),
        (["--nodes", "1", "--profile", "local"], "the profile's scheduler is 'local'"),
        (["--nodes", "1", "--dir", "a$(touch b)"], "names no run folder that can be told from here"),
        (["--nodes", "1", "--", "--metrics", "x"], "--metrics is given to each point by the benchmark"),
    ],
)
def test_a_wrong_request_is_one_line(
    work: Path, cluster: Programs, run: Run, args: list[str], said: str
) -> None:
    done = scaling(run, *args)
    assert (done.code, done.out) == (2, ""), done.err
    assert said in done.err.splitlines()[-1]
    assert not cluster.called()
    assert not (work / "scaling").exists()


def test_a_login_node_needs_no_torch(work: Path, cluster: Programs, run: Run) -> None:
    scaling(run, "--nodes", "1")
    write_point(work / "scaling" / FOUR, 4, 8, 0.5)
    blocked = ["torch", "mpi4py", "h5py", "numpy", "matplotlib", "msgspec"]
    code = f"import sys; sys.modules.update(dict.fromkeys({blocked})); from ddp_hpc.cli import main; main()"
    for args in (["--submit", *SITE, *SHORT, "--nodes", "1,2", "--dry-run"], ["--gather"]):
        argv = [sys.executable, "-c", code, "bench", "scaling", *args]
        done = subprocess.run(argv, cwd=work, env=clean_environ(), capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert done.stdout
    assert done.stderr.splitlines()[-1].startswith("note: communication needs numpy, not installed here; ")
