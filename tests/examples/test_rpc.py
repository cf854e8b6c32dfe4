"""docs/examples/rpc: parameter servers that learn, and end with one line where a rank is lost."""

import importlib.util
import json
import re
import time

import pytest

from tests.conftest import PROJECT
from tests.training.forked import Forks
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


@pytest.fixture(scope="module")
def forks():
    forks = Forks()
    yield forks
    forks.close()


def planted(forks, tmp_path, example, fault, *options):
    """Three ranks with no launcher around that would end them, one with a fault in its 20th step."""
    program, env = "tests.examples.planted", {"PLANT": fault}
    return forks.start(example, *options, cwd=tmp_path, ranks=3, env=env, program=program)


@pytest.mark.parametrize("example", [*EXAMPLES, MONARCH])
def test_the_loss_falls_to_the_noise_and_no_gradient_is_lost(tmp_path, example):
    done = run([*start(3), str(FOLDER / example), "--steps", "150"], tmp_path)
    assert (done.returncode, error_lines(done)) == (0, []), done.stderr
    assert "arning" not in done.stderr
    result = json.loads(done.stdout)
    assert result["num_updates"] == 300
    assert result["first_loss"] > 10
    assert result["final_loss"] < 0.02, "the noise alone is 0.01"


@pytest.mark.soak
def test_torchrun_starts_it_too(tmp_path):
    done = run([*start(2, "torchrun"), str(FOLDER / "with_rpc.py"), "--steps", "20"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["num_updates"] == 20


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("example", EXAMPLES)
def test_a_killed_server_or_trainer_ends_the_others_with_one_line(forks, tmp_path, example, rank):
    job = planted(forks, tmp_path, example, f"kill:{rank}")
    expected = [1, 1, 1]
    expected[rank] = -9
    assert job.wait(60) == expected, job.words()
    assert len(job.errors()) == 1, job.words()
    assert re.search(f"rank {rank}.* is gone", job.errors()[0])


@pytest.mark.soak
@pytest.mark.parametrize(("example", "rank"), [("with_send_recv.py", 2), ("with_rpc.py", 0)])
def test_under_mpiexec_a_killed_rank_ends_the_job_too(tmp_path, example, rank):
    began = time.monotonic()
    done = run([*start(3), PLANTED, example], tmp_path, env={"PLANT": f"kill:{rank}"})
    assert done.returncode != 0
    assert "num_updates" not in done.stdout
    assert len(error_lines(done)) <= 1, done.stderr
    assert "frame #" not in done.stderr, "nobody needs torch's C++ frames to see that a rank is gone"
    assert time.monotonic() - began < 45


@pytest.mark.soak
@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_hangs_is_named_and_ends_the_others(forks, tmp_path, rank):
    job = planted(forks, tmp_path, "with_send_recv.py", f"stop:{rank}", "--hang-timeout-s", "2")
    end_s = time.monotonic() + 30
    while not job.errors():
        assert time.monotonic() < end_s, job.words()
        time.sleep(0.02)
    (line,) = job.errors()
    assert f"rank {rank} on " in line
    assert "its process is stopped" in line
    job.kill()  # the stopped one, which nothing else can end


@pytest.mark.soak
@pytest.mark.parametrize("example", EXAMPLES)
def test_a_trainer_that_is_done_waits_for_a_slow_one_longer_than_for_one_that_hangs(forks, tmp_path, example):
    job = planted(forks, tmp_path, example, "slow:2", "--hang-timeout-s", "1", "--steps", "40")
    assert job.wait(30) == [0, 0, 0], job.words()
    assert '"num_updates": 80' in job.words()


def test_a_server_that_raises_shows_its_traceback_alone(forks, tmp_path):
    job = planted(forks, tmp_path, "with_rpc.py", "raise:0")
    assert job.wait(30) == [1, 1, 1], job.words()
    assert "ValueError: planted in one rank" in job.words()
    assert len(re.findall(r"^\[.*\] Traceback", job.words(), re.MULTILINE)) == 1, job.words()


def test_one_rank_alone_is_refused(tmp_path):
    done = run([*start(1), str(FOLDER / "with_rpc.py")], tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "start at least 2" in done.stderr


def test_help_shows_how_to_start_it(tmp_path):
    done = run([*start(1), str(FOLDER / "with_send_recv.py"), "--help"], tmp_path)
    assert done.returncode == 0
    assert "mpiexec -n 3 python docs/examples/rpc/with_send_recv.py" in done.stdout
    assert "--hang-timeout-s" in done.stdout
