"""docs/examples/rpc: parameter servers that learn, and end with one line if a rank is lost."""

import importlib.util
import json
import re
import time

import pytest

from tests.conftest import PROJECT
from tests.training.runs import error_lines, run, start

FOLDER = PROJECT / "docs" / "examples" / "rpc"
PLANTED = str(PROJECT / "tests" / "examples" / "planted.py")
EXAMPLES = ["with_rpc.py", "with_send_recv.py"]
MONARCH = pytest.param(
    "with_monarch.py",
    marks=pytest.mark.skipif(
        importlib.util.find_spec("monarch") is None,
        reason="pip install torchmonarch, half a gigabyte, is left to whoever changes with_monarch.py",
    ),
)


def forked(forks, tmp_path, example, *options, ranks=3, **env):
    """Ranks of an example that start quickly, without a launcher that would end them."""
    program = "tests.examples.planted"
    return forks.start(example, *options, cwd=tmp_path, ranks=ranks, env=env, program=program)


def planted(forks, tmp_path, example, fault, *options):
    """Three ranks without a launcher that would end them; one has a fault in its 20th step."""
    return forked(forks, tmp_path, example, *options, PLANT=fault)


def check_learned(product):
    result = json.loads(product)
    assert result["num_updates"] == 300
    assert result["first_loss"] > 10
    assert result["final_loss"] < 0.02, "the loss of the noise is 0.01"


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_loss_falls_to_the_noise_and_no_gradient_is_lost(forks, tmp_path, example):
    job = forked(forks, tmp_path, example, "--steps", "150")
    assert job.wait(60) == [0, 0, 0], job.words()
    assert job.errors() == []
    assert "arning" not in job.words()
    (product,) = [line for line in job.words().splitlines() if line.startswith("{")]
    check_learned(product)


@pytest.mark.check
@pytest.mark.parametrize("example", ["with_send_recv.py", MONARCH])
def test_the_mpiexec_command_in_the_help_works(tmp_path, example):
    done = run([*start(2), str(FOLDER / example), "--steps", "300"], tmp_path)
    assert (done.returncode, error_lines(done)) == (0, []), done.stderr
    assert "arning" not in done.stderr
    check_learned(done.stdout)


@pytest.mark.parametrize(
    ("example", "rank"),
    [
        ("with_rpc.py", 0),
        ("with_send_recv.py", 2),
    ],
)
def test_a_killed_server_or_trainer_ends_the_others_with_one_line(forks, tmp_path, example, rank):
    job = planted(forks, tmp_path, example, f"kill:{rank}")
    expected = [1, 1, 1]
    expected[rank] = -9
    assert job.wait(60) == expected, job.words()
    assert len(job.errors()) == 1, job.words()
    assert re.search(f"rank {rank}.* is gone", job.errors()[0])


@pytest.mark.soak
def test_under_mpiexec_a_killed_rank_ends_the_job_too(tmp_path):
    began = time.monotonic()
    done = run([*start(3), PLANTED, "with_rpc.py"], tmp_path, env={"PLANT": "kill:0"})
    assert done.returncode != 0
    assert "num_updates" not in done.stdout
    assert len(error_lines(done)) <= 1, done.stderr
    assert "frame #" not in done.stderr, "torch's C++ frames do not help to find a lost rank"
    assert time.monotonic() - began < 45


@pytest.mark.soak
def test_a_hanging_rank_is_reported_and_ends_the_others(forks, tmp_path):
    job = planted(forks, tmp_path, "with_send_recv.py", "stop:2", "--hang-timeout-s", "2")
    end_s = time.monotonic() + 30
    while not job.errors():
        assert time.monotonic() < end_s, job.words()
        time.sleep(0.02)
    (line,) = job.errors()
    assert "rank 2 on " in line
    assert "its process is stopped" in line
    job.kill()  # the stopped rank, which only SIGKILL can end


def test_only_the_traceback_of_a_failing_server_is_printed(forks, tmp_path):
    job = planted(forks, tmp_path, "with_rpc.py", "raise:0")
    assert job.wait(30) == [1, 1, 1], job.words()
    assert "ValueError: planted in one rank" in job.words()
    assert len(re.findall(r"^\[.*\] Traceback", job.words(), re.MULTILINE)) == 1, job.words()
