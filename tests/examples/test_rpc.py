"""docs/examples/rpc: parameter servers that learn, and end with one line where a rank is lost."""

import json
import time

import pytest

from tests.conftest import PROJECT
from tests.training.forked import Forks
from tests.training.runs import error_lines, run, start

FOLDER = PROJECT / "docs" / "examples" / "rpc"
PLANTED = str(PROJECT / "tests" / "examples" / "planted.py")
EXAMPLES = ["with_rpc.py", "with_send_recv.py"]


@pytest.fixture(scope="module")
def forks():
    forks = Forks()
    yield forks
    forks.close()


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_loss_falls_to_the_noise_and_no_gradient_is_lost(tmp_path, example):
    done = run([*start(3), str(FOLDER / example), "--steps", "150"], tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    result = json.loads(done.stdout)
    assert (result["num_trainers"], result["num_updates"]) == (2, 300)
    assert result["first_loss"] > 10
    assert result["final_loss"] < 0.02, "the noise alone is 0.01"


def test_it_runs_under_torchrun_too(tmp_path):
    done = run([*start(2, "torchrun"), str(FOLDER / "with_rpc.py"), "--steps", "20"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["num_updates"] == 20


@pytest.mark.parametrize(("fault", "who"), [("kill:0", "rank 0"), ("kill:2", "rank 2")])
@pytest.mark.parametrize("example", EXAMPLES)
def test_a_killed_server_or_trainer_ends_the_others_with_one_line(forks, tmp_path, example, fault, who):
    """With no launcher around that would do it."""
    job = forks.start(example, cwd=tmp_path, ranks=3, env={"PLANT": fault}, program="tests.examples.planted")
    codes = job.wait(30)
    assert sorted(codes) == [-9, 1, 1], job.words()
    assert len(job.errors()) == 1, job.words()
    assert f"{who} on " in job.errors()[0]
    assert "is gone" in job.errors()[0]


@pytest.mark.parametrize("fault", ["kill:0", "kill:2"])
def test_mpiexec_ends_when_one_rank_was_killed(tmp_path, fault):
    began = time.monotonic()
    done = run([*start(3), PLANTED, "with_rpc.py"], tmp_path, env={"PLANT": fault})
    assert done.returncode != 0
    assert done.stdout == "" or "BAD TERMINATION" in done.stdout
    assert len(error_lines(done)) <= 1, done.stderr
    assert time.monotonic() - began < 45


@pytest.mark.parametrize("example", EXAMPLES)
def test_a_trainer_that_hangs_is_named(forks, tmp_path, example):
    options = ["--hang-timeout-s", "3"]
    job = forks.start(
        example, *options, cwd=tmp_path, ranks=3, env={"PLANT": "stop:2"}, program="tests.examples.planted"
    )
    while job.running() and not job.errors():
        time.sleep(0.05)
    job.kill()  # the stopped one, too
    print(job.words(), job.wait())


def test_a_server_that_raises_shows_its_traceback_alone(forks, tmp_path):
    env = {"PLANT": "raise:0"}
    job = forks.start("with_send_recv.py", cwd=tmp_path, ranks=3, env=env, program="tests.examples.planted")
    assert job.wait(30) == [1, 1, 1], job.words()
    print(job.words())


@pytest.mark.parametrize("example", EXAMPLES)
def test_one_rank_alone_is_refused(tmp_path, example):
    done = run([*start(1), str(FOLDER / example)], tmp_path)
    assert done.returncode == 2
    assert "start at least 2" in done.stderr
    assert done.stdout == ""
