"""The command `ddp-hpc` as a process: stdout, stderr and exit code."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click
import pytest

from ddp_hpc import __version__
from ddp_hpc.base.options import options_of
from ddp_hpc.cli import cli
from ddp_hpc.request.job import Job
from tests.batch.conftest import ROOT, clean_environ, run_cli


def error_of(*args: str, cwd: Path | None = None, **environ: str) -> str:
    """Returns the error line of an invalid request; checks that stdout is empty and the exit code is 2."""
    done = run_cli(*args, cwd=cwd, **environ)
    assert done.returncode == 2, done.stderr
    assert done.stdout == b""
    last = done.stderr.decode().splitlines()[-1]
    assert last.startswith("error: ")
    return last


def test_render_prints_only_the_script_on_stdout_and_the_profile_on_stderr() -> None:
    done = run_cli("render", "--profile", "local")
    assert done.returncode == 0
    assert done.stdout.startswith(b"#!/bin/bash\n# Written by ddp-hpc ")
    assert done.stderr == b"profile local: named by --profile\n"


def test_the_output_file_is_executable_and_equals_stdout(tmp_path: Path) -> None:
    run_cli("render", "--profile", "local", "-o", "job.sh", cwd=tmp_path)
    assert (tmp_path / "job.sh").read_bytes() == run_cli("render", "--profile", "local").stdout
    assert (tmp_path / "job.sh").stat().st_mode & 0o777 == 0o755


def test_a_rejected_request_does_not_change_the_output_file(tmp_path: Path) -> None:
    (tmp_path / "job.sh").write_text("precious")
    error_of("render", "--profile", "local", "--nodes", "0", "-o", "job.sh", cwd=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["job.sh"]
    assert (tmp_path / "job.sh").read_text() == "precious"


@pytest.mark.parametrize("target", ["directory", "pipe"])
def test_only_regular_files_are_replaced(tmp_path: Path, target: str) -> None:
    (tmp_path / "directory").mkdir()
    os.mkfifo(tmp_path / "pipe")
    assert "is not a regular file" in error_of("render", "--profile", "local", "-o", target, cwd=tmp_path)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--profile", "poalris"], "unknown profile 'poalris' (did you mean \"polaris\"?)"),
        (["--profile", "local", "--nodes", "0"], "--nodes must be at least 1"),
        (["--profile", "local", "--walltime", "25:99"], "ambiguous"),
        (["--profile", "local", "--env", "NAME"], "--env requires NAME=VALUE"),
        (["--profile", "local", "--job", "none.toml"], "none.toml: cannot be read"),
        (["--step", "--nodes", "2"], "--step cannot be combined with --nodes"),
    ],
)
def test_an_invalid_request_is_reported_in_one_line_with_exit_code_2(args: list[str], message: str) -> None:
    assert message in error_of("render", *args)


def test_an_unknown_option_exits_with_2_and_suggests_the_nearest_one() -> None:
    done = run_cli("render", "--node", "2", "--walltme", "1h")
    assert done.returncode == 2
    assert b"No such option" in done.stderr


def test_an_unknown_command_exits_with_2_and_suggests_the_nearest_one() -> None:
    assert (
        error_of("rendre")
        == "error: 'rendre' is not a command (did you mean \"render\"?); see ddp-hpc --help"
    )


def test_every_listed_command_exists_and_has_a_help_text() -> None:
    for name in cli.list_commands(click.Context(cli)):
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        assert command.name == name
        assert command.help


def test_options_after_the_program_belong_to_the_job_command() -> None:
    done = run_cli("render", "--profile", "local", "python", "train.py", "--nodes", "7")
    assert b'\n  ddp-hpc exec -- python train.py --nodes 7 "$@"\n' in done.stdout
    assert (
        done.stdout
        == run_cli("render", "--profile", "local", "--", "python", "train.py", "--nodes", "7").stdout
    )


def test_the_account_is_read_from_the_environment() -> None:
    done = run_cli("render", "--profile", "polaris", DDP_HPC_ACCOUNT="Proj")
    assert b"\n#PBS -A Proj\n" in done.stdout
    assert b"--account Proj" in done.stdout
    done = run_cli("render", "--profile", "polaris", "--account", "Mine", DDP_HPC_ACCOUNT="Proj")
    assert b"\n#PBS -A Mine\n" in done.stdout


def test_the_profile_is_read_from_the_job_file(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text('profile = "generic_pbs"\nnodes = 3\n')
    done = run_cli("render", "--job", "job.toml", "--nodes", "4", cwd=tmp_path)
    assert done.stderr.startswith(b"profile generic_pbs: named by the job file\n")
    assert b"--gpus-per-node" in done.stderr, "without GPU facts in the profile, a warning is printed"
    assert b"#PBS -l select=4:ncpus=1:mpiprocs=1\n" in done.stdout
    assert b"job.toml" not in done.stdout  # the command in the header does not need the file


def test_arguments_that_are_not_utf8_are_preserved() -> None:
    argv = [
        sys.executable.encode(),
        b"-m",
        b"ddp_hpc",
        b"render",
        b"--profile",
        b"local",
        b"--",
        b"./run",
        b"\xff",
    ]
    done = subprocess.run(argv, env=clean_environ(LC_ALL="C"), capture_output=True, timeout=60)
    assert b"\n  ./run '\xff' \"$@\"\n" in done.stdout


def test_profiles_are_listed_with_scheduler_and_date() -> None:
    heading, *lines = run_cli("profiles", "list").stdout.decode().splitlines()
    assert heading.split() == ["name", "scheduler", "confidence", "checked", "site"]
    assert re.search(
        r"^polaris +pbs +high +20\d\d-\d\d-\d\d  Polaris \(ALCF\)$", "\n".join(lines), re.MULTILINE
    )
    assert [line.split()[0] for line in lines] == sorted(
        path.stem for path in (ROOT / "profiles").glob("*.toml")
    )


def test_profiles_show_prints_the_file() -> None:
    assert run_cli("profiles", "show", "polaris").stdout == (ROOT / "profiles" / "polaris.toml").read_bytes()
    assert 'did you mean "polaris"' in error_of("profiles", "show", "polari")


def test_version_and_help_are_printed() -> None:
    assert run_cli("--version").stdout.decode().strip().endswith(__version__)
    for command in ([], ["render"], ["profiles"], ["profiles", "list"], ["profiles", "show"], ["env"]):
        done = run_cli(*command, "--help")
        assert done.returncode == 0
        assert done.stdout.startswith(b"Usage: ddp-hpc")


@pytest.mark.parametrize(
    ("command", "own"),
    [
        (["render"], "--output"),
        (["submit"], "--dry-run"),
    ],
)
def test_help_shows_the_options_of_a_job_in_sections(command: list[str], own: str) -> None:
    text = run_cli(*command, "--help").stdout.decode()
    parts = re.split(r"^([A-Z][a-z]+):$", text, flags=re.MULTILINE)
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    assert [*sections] == ["Job", "Scheduler", "Software", "Launcher", "Resuming", "Script", "Options"]
    shown = {option: title for title in sections for option in re.findall(r"--[a-z-]+", sections[title])}
    options = [option.flag for option in options_of(Job) if option.name != "command"]
    assert not [option for option in options if shown.get(option) == "Options"]
    assert own in sections["Options"]
    assert "[COMMAND]" not in sections["Options"], "COMMAND is an argument"


def completed(words: str, **options: Any) -> list[str]:
    """Returns the words that bash would offer for the last word."""
    count = len(words.split(" ")) - 1
    environ = {"_DDP_HPC_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(count)}
    return [line.partition(",")[2] for line in run_cli(**options, **environ).stdout.decode().splitlines()]


def test_shell_completion_knows_the_commands() -> None:
    assert completed("ddp-hpc ren") == ["render"]


@pytest.mark.parametrize(
    "words",
    [
        "ddp-hpc profiles show polar",
        *(f"ddp-hpc {command} --profile polar" for command in ("submit", "estimate")),
    ],
)
def test_shell_completion_knows_the_profiles(words: str) -> None:
    assert completed(words) == ["polaris"]


def test_profiles_are_printed_as_json() -> None:
    [polaris] = [
        one for one in json.loads(run_cli("profiles", "list", "--json").stdout) if one["name"] == "polaris"
    ]
    assert (polaris["scheduler"], polaris["title"]) == ("pbs", "Polaris (ALCF)")
    shown = json.loads(run_cli("profiles", "show", "polaris", "--json").stdout)
    assert (shown["name"], shown["scheduler"], shown["node"]["devices"]) == ("polaris", "pbs", 4)


def test_a_closed_pipe_causes_no_traceback() -> None:
    argv = f"{sys.executable} -m ddp_hpc profiles show polaris | true"
    done = subprocess.run(["bash", "-c", argv], env=clean_environ(), capture_output=True, timeout=60)
    assert done.stderr == b""


def test_ctrl_c_exits_with_130(tmp_path: Path) -> None:
    # The command waits forever, as it reads the job file from a pipe without a writer.
    os.mkfifo(tmp_path / "job.toml")
    argv = [sys.executable, "-m", "ddp_hpc", "render", "--job", "job.toml"]
    with subprocess.Popen(argv, cwd=tmp_path, env=clean_environ(), stderr=subprocess.PIPE) as process:
        writer = os.open(tmp_path / "job.toml", os.O_WRONLY)  # returns once the reader has it open
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == 130
        os.close(writer)
        assert process.stderr is not None
        assert process.stderr.read().strip() == b"interrupted"


def test_help_imports_neither_commands_nor_configurations_nor_templates() -> None:
    program = "import sys, ddp_hpc.cli; print(*sys.modules, sep='\\n')"
    done = subprocess.run(
        [sys.executable, "-c", program], env=clean_environ(), capture_output=True, text=True
    )
    imported = done.stdout.split()
    assert "ddp_hpc.base.errors" in imported
    slow = ("ddp_hpc.commands", "ddp_hpc.request", "ddp_hpc.base.options", "dataclasses", "jinja2")
    assert not [name for name in imported if name.startswith(slow)]


def test_train_runs_the_same_program_as_the_module(tmp_path: Path) -> None:
    # main() of ddp-hpc disables the garbage collector; training must enable it again.
    (tmp_path / "mine.py").write_text(
        "import gc; from torch import nn; net = lambda: nn.Linear(20, int(gc.isenabled()))"
    )
    data = ("--src-shape", "20", "--tgt-shape", "1", "--num-samples", "8")
    done = run_cli("train", "--model", "mine:net", *data, "--max-steps", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert b"done: 1 steps" in done.stdout
    shown = run_cli("train", "--help")
    assert shown.stdout.startswith(b"Usage: python -m ddp_hpc.train [OPTIONS]")
