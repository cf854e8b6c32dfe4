"""Programs with other libraries run past several walltimes, in rehearsed jobs with real launchers."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import pytest

from tests.conftest import Launch, skip_without

from .conftest import EXAMPLES, NEEDS, RunExample, weights

pytestmark = [pytest.mark.soak]

NUM_STEPS = 240
# Importing Lightning takes up to 15 s on a busy machine, and the examples stop 10 s before the end.
WALLTIMES = ["--walltime-s", "40", "--max-jobs", "9"]
BY_SIGNAL = ["--requeue", "on-signal", "--signal", "TERM@10", "--progress", "checkpoints"]


# tests/examples/test_library.py does the same with the library, whose margin depends on the scheduler.
NAMES = [*(name for name in NEEDS if name != "library_loop.py"), "plain_ddp.py"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("profile", "launcher"),
    [("generic_pbs", "mpiexec"), ("generic_pbs", "torchrun"), ("generic_slurm", "srun")],
)
def test_a_run_of_several_walltimes_has_the_weights_of_an_uninterrupted_one(
    name: str, profile: str, launcher: str, launch: Launch, run_example: RunExample, tmp_path: Path
) -> None:
    skip_without(NEEDS.get(name, "torch"))
    # DeepSpeed compiles an extension, which takes longer than a walltime; the first run does it for all.
    env = {"TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions")}
    whole = run_example(name, launcher="mpiexec", num_steps=NUM_STEPS, checkpoints="whole", env=env)
    assert whole.exit_code == 0, whole.stderr
    (tmp_path / "program.py").write_text((EXAMPLES / name).read_text(encoding="utf-8"))
    options = [
        *(BY_SIGNAL if name == "plain_ddp.py" else []),
        *(f"--env={one}={value}" for one, value in env.items()),
    ]
    words = ["--profile", profile, "--launcher", launcher, "--ranks-per-node", "2", "--walltime", "01:00:00"]
    command = ["python", "program.py", str(NUM_STEPS), "checkpoints"]
    rendered = launch(
        ["python", "-m", "ddp_hpc", "render", *words, *options, "-o", "job.sh", "--", *command], cwd=tmp_path
    )
    assert rendered.exit_code == 0, rendered.stderr
    with tempfile.TemporaryDirectory(prefix="t-") as temp:
        done = launch(
            ["python", "-m", "ddp_hpc", "rehearse", "job.sh", "--here", *WALLTIMES],
            env={"TMPDIR": temp, "OMP_NUM_THREADS": "1"},
            cwd=tmp_path,
            timeout_s=500.0,
        )
    assert done.exit_code == 0, done.stdout + done.stderr
    attempts = re.findall(r"^ddp-hpc: attempt (\d+) of at most 20", done.stdout, re.MULTILINE)
    assert len(attempts) >= 2, done.stdout
    if name != "hf_trainer.py":  # which prints no steps
        trained = re.findall(r"^trained step (\d+)$", done.stdout, re.MULTILINE)
        assert trained == [str(step) for step in range(NUM_STEPS)]
    # A program that completes after the signal is run once more, since exit code 0 can also mean: saved.
    assert set(re.findall(r"^weights (\w+)$", done.stdout, re.MULTILINE)) == {weights(whole)}
