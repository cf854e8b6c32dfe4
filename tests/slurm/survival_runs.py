"""A training on two nodes with one rank each, submitted as `ddp-hpc render` writes it, and its files."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tests.training.forked import Forks

from .cluster import Cluster
from .head_node import JobEnd
from .nodes import ClusterError, wait_for

PROJECT = Path(__file__).resolve().parents[2]
PYTHON = Path(sys.executable).parent / "python"
SLOW = PROJECT / "tests" / "slurm" / "slow_training.py"
# All nodes share this machine's cores, but each node would use all of them.
OPTIONS = ["--model", "linear", "--num-samples", "2000", "--batch-size", "4", "--threads", "1"]
OPTIONS += ["--init-timeout", "60", "--metrics", "metrics.jsonl"]


@dataclass(frozen=True)
class Run:
    """A submitted training."""

    cluster: Cluster
    folder: Path
    job: str

    @property
    def log(self) -> str:
        return "".join(path.read_text() for path in self.folder.glob(f"*-{self.job}.out"))

    @property
    def state(self) -> str:
        """The content of the file `state` in the run directory; empty if it does not exist."""
        path = self.folder / "runs" / "ddp" / "state"
        return path.read_text().strip() if path.exists() else ""

    @property
    def attempts(self) -> list[tuple[int, str, int]]:
        """The number, job ID and first step of each start."""
        lines = (self.folder / "runs" / "ddp" / "attempts").read_text().splitlines()
        return [(int(number), job, int(step)) for number, job, step, _ in map(str.split, lines)]

    @property
    def losses(self) -> list[tuple[int, float]]:
        """The step and loss of each line of the metrics file."""
        return read_losses(self.folder / "metrics.jsonl")

    def wait_for_words(self, words: str, timeout: float = 180.0) -> None:
        """Waits until the job's log contains this text."""
        try:
            wait_for(f"'{words}'", lambda: words in self.log, timeout, 0.1)
        except ClusterError as error:
            raise ClusterError(f"{error}; state: {self.state}; log:\n{self.log}") from None

    def wait_for_step(self, step: int) -> None:
        """Waits until all ranks have completed this step."""
        self.wait_for_words(f" step {step}/")

    def kill_rank(self, rank: int, signal: str = "KILL") -> None:
        """Sends the signal to the rank, on its node."""
        pid = (self.folder / f"pid-{rank}").read_text()
        self.cluster.run(["kill", f"-{signal}", pid], node=self.cluster.node_names[rank]).check_returncode()

    def kill(self, words: str, node_rank: int = 0, *, limit: int = 1) -> bool:
        """Kills the oldest processes of the node whose command line contains these words, at most `limit`;
        returns whether there was one.
        """
        node = self.cluster.node_names[node_rank]
        pids = self.cluster.run(["pgrep", "--full", "--", words], node=node).stdout.split()[:limit]
        # A process can end between the two commands because another one of them was killed.
        each = 'for pid; do kill -KILL "$pid" && killed=1; done; [ "$killed" ]'
        return self.cluster.run(["sh", "-c", each, "kill", *pids], node=node).returncode == 0

    def processes(self) -> list[str]:
        """Returns the processes of the job on all nodes, by /proc; empty if none is left."""
        look = f"grep -lzx SLURM_JOB_ID={self.job} /proc/[0-9]*/environ"
        found = [self.cluster.run(["sh", "-c", look], node=node) for node in self.cluster.node_names]
        return [line for done in found for line in done.stdout.splitlines()]

    def check_nothing_left(self) -> None:
        """Checks that no process of the job is left; Slurm ends them in the background."""
        wait_for("end of the job's processes", lambda: not self.processes(), 30, 0.5)

    def end(self, timeout: float = 120.0) -> JobEnd:
        """Waits for the end of the job, which root starts again immediately after each requeue."""
        return self.cluster.wait(self.job, timeout, requeues_at_once=True)


def submit(
    cluster: Cluster, folder: Path, *options: str, num_steps: int, step_s: float, render: tuple[str, ...] = ()
) -> Run:
    """Renders and submits a training of `num_steps` steps; `options` are those of ddp_hpc.train."""
    program = ["python", SLOW, *OPTIONS, "--max-steps", num_steps, *options]
    return submit_program(cluster, folder, program, step_s=step_s, render=render)


def submit_program(
    cluster: Cluster,
    folder: Path,
    program: Sequence[object],
    *,
    step_s: float,
    render: tuple[str, ...] = (),
    sbatch: tuple[str, ...] = (),
) -> Run:
    """Renders and submits this command line; `sbatch` are options of its command line."""
    script = folder / "job.sbatch"
    argv = [PYTHON, "-m", "ddp_hpc", "render", "--profile", "generic_slurm", "--name", "ddp", "--nodes", "2"]
    argv += ["--ranks-per-node", "1", "--walltime", "00:05:00", *render, "-o", script, "--", *program]
    env = {"PYTHONPATH": str(PROJECT), "STEP_S": str(step_s)}
    done = cluster.run(list(map(str, argv)), env=env, cwd=folder)
    assert done.returncode == 0, done.stderr
    return Run(cluster, folder, cluster.sbatch(script, *sbatch, env=env, cwd=folder))


def resubmit(run: Run, step_s: float = 0.05, *sbatch: str) -> Run:
    """Submits the script of the run again, as a user does; `sbatch` are options of its command line."""
    env = {"PYTHONPATH": str(PROJECT), "STEP_S": str(step_s)}
    return replace(run, job=run.cluster.sbatch(run.folder / "job.sbatch", *sbatch, env=env, cwd=run.folder))


def losses_of_a_quiet_run(
    forks: Forks, folder: Path, num_steps: int, *options: str
) -> list[tuple[int, float]]:
    """Returns the losses of the same training without Slurm and failures; `options` are more options."""
    (home := folder / "without_slurm").mkdir()
    forks.run(*OPTIONS, "--max-steps", str(num_steps), *options, cwd=home, ranks=2)
    return read_losses(home / "metrics.jsonl")


def assert_same_weights(run_dir: Path, other: Path, step: int) -> None:
    """Checks that the snapshots of two runs after this step have the same weights and optimizer state."""
    import torch

    from ddp_hpc.training.snapshots.snapshot_files import read_snapshot, snapshot_name

    one, two = (read_snapshot(path / "snapshots" / snapshot_name(step)) for path in (run_dir, other))
    for mine, theirs in ((one.model, two.model), (one.training, two.training)):
        assert {*mine} == {*theirs}
        assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []


def read_losses(path: Path) -> list[tuple[int, float]]:
    records = map(json.loads, path.read_text().splitlines())
    return [(record["step"], record["loss"]) for record in records]
