"""`ddp-hpc bench comm` on four real ranks, with correct results and with planted faults."""

from __future__ import annotations

import json
import shlex
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ddp_hpc.base.errors import RequestError
from ddp_hpc.bench.comm.parse_options import KINDS
from ddp_hpc.cli import cli
from ddp_hpc.commands.bench import comm as bench_comm
from tests.training.forked import Forks, Job
from tests.training.runs import run, start

PLANTED = "tests.bench.planted"
QUICK = ("--iterations", "3", "--warmup", "1")
SMALL = ("--bytes", "4KiB", *QUICK)
FIELDS = ["name", "bytes", "dtype", "ranks", "ranks_per_node", "iterations", "median_us", "p99_us"]
FIELDS += ["algbw_bytes_per_s", "busbw_bytes_per_s", "correct"]
# The factors in doc/PERFORMANCE.md of nccl-tests, calculated by hand for 4 ranks.
FACTORS_OF_4 = {"all_reduce": 1.5, "reduce": 1, "broadcast": 1, "all_gather": 0.75}
FACTORS_OF_4 |= {"reduce_scatter": 0.75, "all_to_all": 0.75, "send_recv": 1}


@dataclass(frozen=True)
class Ran:
    """A run of all collectives on four ranks under mpiexec."""

    directory: Path
    stdout: str
    stderr: str

    @property
    def result(self) -> dict[str, Any]:
        result: dict[str, Any] = json.loads((self.directory / "new/comm.json").read_text())
        return result


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    directory = tmp_path_factory.mktemp("comm")
    options = ["--bytes", "4KiB", "--bytes", "1000", *QUICK, "--json", "new/comm.json"]
    done = run([*start(4), "-m", "ddp_hpc", "bench", "comm", *options], directory)
    assert done.returncode == 0, done.stderr
    return Ran(directory, done.stdout, done.stderr)


def table_of(stdout: str) -> list[str]:
    """Returns the lines of the table, without those that gloo of torch 2.8 prints."""
    return [line for line in stdout.splitlines() if not line.startswith("[Gloo]")]


def forked(forks: Forks, directory: Path, fault: str, *options: str | Path) -> tuple[list[int], Job]:
    """Runs `bench comm OPTIONS` on four ranks with a planted fault until all have ended."""
    job = forks.start(fault, *options, cwd=directory, ranks=4, program=PLANTED)
    return job.wait(), job


def rows_of(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    return rows


# The output of a run.


def test_every_collective_of_every_size_is_correct_on_four_ranks(ran: Ran) -> None:
    rows = ran.result["rows"]
    assert [row["name"] for row in rows] == [name for name in KINDS for _ in range(2)]
    for row in rows:
        assert list(row) == FIELDS
        assert row["correct"] is True
        assert (row["ranks"], row["ranks_per_node"], row["iterations"]) == (4, 4, 3)


def test_bandwidths_equal_a_calculation_by_hand(ran: Ran) -> None:
    for row in ran.result["rows"]:
        assert 0 < row["median_us"] <= row["p99_us"]
        assert row["algbw_bytes_per_s"] == pytest.approx(row["bytes"] / row["median_us"] * 1e6)
        factor = FACTORS_OF_4[row["name"]]
        assert row["busbw_bytes_per_s"] == pytest.approx(row["algbw_bytes_per_s"] * factor)


def test_a_size_that_cannot_be_divided_evenly_is_rounded_down(ran: Ran) -> None:
    sizes = {row["name"]: row["bytes"] for row in ran.result["rows"] if row["bytes"] != 4096}
    shared = ("all_gather", "reduce_scatter", "all_to_all")
    assert sizes == {name: 992 if name in shared else 1000 for name in KINDS}, "62 elements of 4 bytes each"


def test_only_rank_0_writes_the_table_and_the_json(ran: Ran) -> None:
    lines = table_of(ran.stdout)
    assert lines[0].split()[0] == "collective"
    assert [line.split()[0] for line in lines[1:]] == [name for name in KINDS for _ in range(2)]
    assert {line.split()[-1] for line in lines[1:]} == {"true"}
    assert sorted(path.name for path in ran.directory.rglob("*")) == ["comm.json", "new"]


def test_progress_is_plain_lines_on_stderr(ran: Ran) -> None:
    assert ran.stderr.count("world: 4 ranks on 1 node") == 1
    for name in KINDS:
        assert ran.stderr.count(f"\n{name}: 2 sizes, ") == 1
    assert "\r" not in ran.stderr


def test_the_json_describes_machine_settings_and_transport(ran: Ran) -> None:
    result = ran.result
    assert result["name"] == "comm"
    assert {"torch", "ddp_hpc"} <= set(result["versions"])
    settings = result["settings"]
    assert [settings[k] for k in ("ranks", "nodes", "backend", "device")] == [4, 1, "gloo", "cpu"]
    assert result["machine"]["cores"] >= 1
    assert result["transport"]["addresses"] == ["127.0.0.1 of lo (GLOO_SOCKET_IFNAME)"]


# Faults are detected.


@pytest.mark.check
def test_one_flipped_element_under_mpiexec_is_reported_with_its_rank(tmp_path: Path) -> None:
    argv = ["-m", PLANTED, "flip:all_reduce:2", *SMALL, "--collectives", "all_reduce,broadcast"]
    done = run([*start(4), *argv, "--json", "comm.json"], tmp_path)
    assert done.returncode == 1
    found = "rank 2 has 1 of 1,024 elements wrong, the first at 7: "
    assert f"wrong result: all_reduce of 4.0 KiB: {found}" in done.stderr
    errors = [line for line in done.stderr.splitlines() if "error: " in line]
    assert len(errors) == 1
    assert "error: wrong results in 1 of 2 rows (see above)" in errors[0]
    assert [row["correct"] for row in rows_of(tmp_path / "comm.json")] == [False, True]
    assert [line.split()[-1] for line in table_of(done.stdout)[1:]] == ["FALSE", "true"]


@pytest.mark.check
@pytest.mark.parametrize(
    ("fault", "found"),
    [
        ("swap:all_gather:1", "rank 1 has 512 of 1,024 elements wrong, the first at 256: "),
        ("late:reduce:0", "rank 0 has 1 of 1,024 elements wrong, the first at 0: 0 instead of "),
    ],
)
def test_swapped_blocks_and_late_faults_are_detected(
    tmp_path: Path, forks: Forks, fault: str, found: str
) -> None:
    name = fault.split(":")[1].removesuffix("_single")
    codes, job = forked(forks, tmp_path, fault, *SMALL, "--collectives", name)
    assert codes == [1] * 4
    assert f"wrong result: {name} of 4.0 KiB: {found}" in job.words()
    assert len(job.errors()) == 1


@pytest.mark.check
def test_an_unsupported_collective_is_skipped_with_a_line(tmp_path: Path, forks: Forks) -> None:
    options = [*SMALL, "--collectives", "reduce_scatter,broadcast", "--json", "comm.json"]
    codes, job = forked(forks, tmp_path, "refuse:reduce_scatter:all", *options)
    assert codes == [0] * 4, job.words()
    line = "reduce_scatter of 4.0 KiB: skipped with all larger sizes, "
    assert f"{line}because gloo failed: ProcessGroupGloo does not support this\n" in job.words()
    assert [row["name"] for row in rows_of(tmp_path / "comm.json")] == ["broadcast"]


@pytest.mark.check
def test_measuring_nothing_is_a_failure(tmp_path: Path, forks: Forks) -> None:
    options = [*SMALL, "--collectives", "reduce_scatter", "--json", "comm.json"]
    codes, job = forked(forks, tmp_path, "refuse:reduce_scatter:all", *options)
    assert codes == [1] * 4
    assert "error: nothing was measured: gloo supports none of the requested collectives" in job.errors()[0]
    assert not (tmp_path / "comm.json").exists()


@pytest.mark.check
def test_an_error_of_a_single_rank_ends_all_and_is_reported(tmp_path: Path, forks: Forks) -> None:
    codes, job = forked(forks, tmp_path, "refuse:all_reduce:2", *SMALL, "--collectives", "all_reduce")
    assert codes == [1] * 4
    (line,) = job.errors()
    assert "all_reduce of 4.0 KiB: only rank 2 failed: ProcessGroupGloo does" in line


@pytest.mark.check
def test_a_rank_that_is_stopped_in_a_call_ends_the_run_and_is_reported(tmp_path: Path, forks: Forks) -> None:
    options = [*SMALL, "--collectives", "all_reduce", "--hang-timeout", "1"]
    job = forks.start("stop:all_reduce:2", *options, cwd=tmp_path, ranks=4, program=PLANTED)
    end_s = time.monotonic() + 30
    while not job.errors() and time.monotonic() < end_s:
        time.sleep(0.05)
    job.kill()  # a stopped process handles no other signal
    job.wait()
    (line,) = job.errors()
    assert "error: " in line
    assert "rank 2 on " in line
    assert "its process is stopped" in line


def test_a_rank_that_is_killed_in_a_call_ends_the_run_and_is_reported(tmp_path: Path, forks: Forks) -> None:
    codes, job = forked(forks, tmp_path, "kill:all_reduce:2", *SMALL, "--collectives", "all_reduce")
    assert codes == [1, 1, -9, 1]
    (line,) = job.errors()
    assert "error: rank 2 on " in line
    assert " is gone: " in line


# Groups of ranks.


@pytest.mark.check
def test_the_ranks_per_node_are_those_of_the_launcher(tmp_path: Path, forks: Forks) -> None:
    options = [*SMALL, "--json", "comm.json", "--collectives", "all_to_all,send_recv"]
    codes, job = forked(forks, tmp_path, "two_nodes", *options)
    assert codes == [0] * 4, job.words()
    rows = rows_of(tmp_path / "comm.json")
    assert [(row["ranks"], row["ranks_per_node"], row["correct"]) for row in rows] == [(4, 2, True)] * 2


# The gradients of a model.


# Comparison with a baseline.


# Invalid requests.


def test_for_a_single_rank_the_error_shows_how_to_start_more(tmp_path: Path) -> None:
    done = run([*start(1), "-m", "ddp_hpc", "bench", "comm", "--json", "comm.json"], tmp_path)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: bench comm needs at least 2 ranks, but 1 was started. ")
    assert "mpiexec -n 4 ddp-hpc bench comm" in line
    assert not (tmp_path / "comm.json").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--collectives", "all_redoce"], "unknown collective 'all_redoce' (did you mean \"all_reduce\"?)"),
        (["--bytes", "3MB"], "--bytes '3MB' is not a size"),
        (["--min-bytes", "2MiB", "--max-bytes", "1MiB"], "--min-bytes 2097152 must not exceed --max-bytes"),
        (["--bytes", "1KiB", "--factor", "2"], "--bytes cannot be combined with --factor"),
        (["--seconds", "nan"], "--seconds must be finite and at least 0 (got nan)"),
        (["--timeout", "0"], "--timeout must be greater than 0 (got 0.0)"),
    ],
)
def test_an_invalid_option_is_rejected_before_anything_is_started(options: list[str], message: str) -> None:
    done = CliRunner().invoke(cli, ["bench", "comm", *options])
    assert isinstance(done.exception, RequestError)
    assert message in str(done.exception)


@pytest.mark.parametrize("options", [["--bytes", "3MB"], ["--factor", "1"]])
def test_only_rank_0_reports_an_invalid_command_line(
    monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    done = CliRunner().invoke(cli, ["bench", "comm", *options])
    assert done.exit_code == 2
    assert done.output == ""


@pytest.mark.check
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--bytes", "1PiB"], "buffers of 1.0 PiB need 20.0 PiB of memory per node, but only "),
        (["--json", "precious.txt"], "--json precious.txt exists and is not JSON; use another file"),
        (["--backend", "nccl", "--device", "auto"], "--backend nccl needs CUDA devices"),
    ],
)
def test_a_request_that_cannot_be_fulfilled_ends_all_ranks_with_one_line(
    tmp_path: Path, forks: Forks, no_gpu: None, options: list[str], message: str
) -> None:
    (tmp_path / "precious.txt").write_text("precious")
    codes, job = forked(forks, tmp_path, "none", *options)
    assert codes == [2] * 4, job.words()
    (line,) = job.errors()
    assert message in line
    assert (tmp_path / "precious.txt").read_text() == "precious"


def test_the_examples_in_the_help_are_valid_command_lines() -> None:
    text = CliRunner().invoke(cli, ["bench", "comm", "--help"]).output
    words = [shlex.split(line) for line in text.splitlines() if " bench comm" in line and "Usage" not in line]
    examples = [line[line.index("comm") + 1 :] for line in words if "ddp-hpc" in line or "ddp_hpc" in line]
    assert len(examples) == 5
    for options in examples:
        bench_comm.make_context("comm", options)
