"""Job requests from options and a job file, and requests that are refused for every site."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ddp_hpc.base.errors import RequestError
from ddp_hpc.base.options import merged_values
from ddp_hpc.base.toml_options import toml_options
from ddp_hpc.request.job import Job


def job_of(tmp_path: Path, text: str, **options: Any) -> Job:
    path = tmp_path / "job.toml"
    path.write_text(text)
    return Job.of(**merged_values(Job, toml_options(path, Job), options))


def test_a_job_file_spells_the_options_with_underscores(tmp_path: Path) -> None:
    job = job_of(
        tmp_path,
        """
profile = "polaris"
name = "big"
nodes = 4
ranks_per_node = 2
walltime = "01:30:00"
setup = ["module load a"]
command = ["python", "train.py"]
[env]
NCCL_DEBUG = "INFO"
""",
    )
    assert (job.name, job.num_nodes, job.ranks_per_node, job.walltime_s) == ("big", 4, 2, 5400)
    assert (job.setup, job.command, job.env) == (
        ("module load a",),
        ("python", "train.py"),
        {"NCCL_DEBUG": "INFO"},
    )


def test_options_win_over_the_file(tmp_path: Path) -> None:
    text = 'nodes = 4\nqueue = "prod"\nname = "big"'
    job = job_of(tmp_path, text, nodes=2, queue="debug")
    assert (job.num_nodes, job.queue, job.name) == (2, "debug", "big")


def test_variables_are_merged_and_setup_lines_follow_each_other(tmp_path: Path) -> None:
    text = 'setup = ["first"]\nenv = { A = "file", B = "file" }'
    job = job_of(tmp_path, text, env=(("B", "option"), ("C", "option")), setup=("second",))
    assert job.env == {"A": "file", "B": "option", "C": "option"}
    assert job.setup == ("first", "second")


def test_an_unknown_key_is_an_error_with_file_line_and_nearest_key(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r'job\.toml: unknown key "waltime" \(did you mean "walltime"\?\)'):
        job_of(tmp_path, 'nodes = 1\nwaltime = "01:00:00"\n')


def test_a_missing_job_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"nowhere\.toml: cannot be read \(No such file"):
        toml_options(tmp_path / "nowhere.toml", Job)


@pytest.mark.parametrize(
    ("job", "said"),
    [
        ({"num_nodes": 0}, "--nodes must be at least 1 (got 0)"),
        ({"num_nodes": -2}, "--nodes must be at least 1 (got -2)"),
        ({"ranks_per_node": 0}, "--ranks-per-node must be at least 1"),
        ({"gpus_per_node": -1}, "--gpus-per-node must be at least 0"),
        ({"cpus_per_node": 0}, "--cpus-per-node must be at least 1"),
        ({"max_attempts": 0}, "--max-attempts must be at least 1"),
        ({"num_nodes": 4, "min_nodes": 0}, "--min-nodes must be at least 1"),
        ({"num_nodes": 4, "min_nodes": 5}, "--min-nodes must be at most 4"),
        ({"name": ""}, "job name ''"),
        ({"name": "1st"}, "job name '1st'"),
        ({"name": "two words"}, "job name 'two words'"),
        ({"name": "a\nb"}, "job name"),
        ({"name": "a/b"}, "job name"),
        ({"name": "$(touch x)"}, "job name"),
        ({"name": "n" * 129}, "129 characters"),
        ({"mpi": "pmix2"}, 'did you mean "pmix"'),
        ({"env": {"A B": "x"}}, "invalid variable name 'A B'"),
        ({"env": {"UID": "0"}}, "a bash variable that scripts cannot set"),
        ({"env": {"A": "x\0y"}}, "NUL"),
        ({"setup": ("one\ntwo",)}, "line break"),
        ({"command": ()}, "the command is empty"),
        ({"command": ("",)}, "the command is empty"),
        ({"command": ("--epochs", "3")}, "the launcher would read as its own option"),
        ({"command": ("a", ":", "b")}, "start of a second program"),
        ({"command": ("a", "\0")}, "NUL"),
        ({"run_dir": "a\0b"}, "NUL"),
    ],
)
def test_a_request_that_no_scheduler_accepts_is_refused(job: dict[str, object], said: str) -> None:
    with pytest.raises(RequestError) as caught:
        Job(**job)  # type: ignore[arg-type]
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_invalid_walltime_in_a_file_is_refused_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"job.toml: walltime '25:99:00': minutes must be at most 59"):
        job_of(tmp_path, 'walltime = "25:99:00"')
