"""`ddp-hpc bench comm` on four real ranks: every result is checked, and what is wrong is found and named."""

from __future__ import annotations

import json
import shlex
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ddp_hpc.bench.comm_request import KINDS
from ddp_hpc.cli import cli
from ddp_hpc.commands.bench import comm as bench_comm
from ddp_hpc.errors import RequestError
from tests.training.forked import Forks, Job
from tests.training.runs import run, start

PLANTED = "tests.bench.planted"
QUICK = ("--iterations", "3", "--warmup", "1")
SMALL = ("--bytes", "4KiB", *QUICK)
FIELDS = ["name", "bytes", "dtype", "ranks", "ranks_per_node", "iterations", "median_us", "p99_us"]
FIELDS += ["algbw_bytes_per_s", "busbw_bytes_per_s", "correct"]
# nccl-tests' doc/PERFORMANCE.md, worked out by hand for 4 ranks.
FACTORS_OF_4 = {"all_reduce": 1.5, "reduce": 1, "broadcast": 1, "all_gather": 0.75}
FACTORS_OF_4 |= {"reduce_scatter": 0.75, "all_to_all": 0.75, "send_recv": 1}


@dataclass(frozen=True)
class Ran:
    """A run of all collectives on four ranks under mpiexec."""

    folder: Path
    stdout: str
    stderr: str

    @property
    def result(self) -> dict[str, Any]:
        result: dict[str, Any] = json.loads((self.folder / "new/comm.json").read_text())
        return result


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    folder = tmp_path_factory.mktemp("comm")
    files = ["--json", "new/comm.json", "--picture", "comm.png"]
    options = ["--bytes", "4KiB", "--bytes", "1000", *QUICK, *files]
    done = run([*start(4), "-m", "ddp_hpc", "bench", "comm", *options], folder)
    assert done.returncode == 0, done.stderr
    return Ran(folder, done.stdout, done.stderr)


def forked(forks: Forks, folder: Path, fault: str, *options: str | Path) -> tuple[list[int], Job]:
    """`bench comm OPTIONS` on four ranks with that fault, at its end."""
    job = forks.start(fault, *options, cwd=folder, ranks=4, program=PLANTED)
    return job.wait(), job


def rows_of(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    return rows


# What a run gives.


def test_every_collective_of_every_size_is_correct_on_four_ranks(ran: Ran) -> None:
    rows = ran.result["rows"]
    assert [row["name"] for row in rows] == [name for name in KINDS for _ in range(2)]
    for row in rows:
        assert list(row) == FIELDS
        assert row["correct"] is True
        assert (row["ranks"], row["ranks_per_node"], row["iterations"]) == (4, 4, 3)


def test_bandwidths_are_those_of_a_hand_calculation(ran: Ran) -> None:
    for row in ran.result["rows"]:
        assert 0 < row["median_us"] <= row["p99_us"]
        assert row["algbw_bytes_per_s"] == pytest.approx(row["bytes"] / row["median_us"] * 1e6)
        factor = FACTORS_OF_4[row["name"]]
        assert row["busbw_bytes_per_s"] == pytest.approx(row["algbw_bytes_per_s"] * factor)


def test_a_size_that_ranks_cannot_share_is_rounded_down_and_told_as_it_was(ran: Ran) -> None:
    sizes = {row["name"]: row["bytes"] for row in ran.result["rows"] if row["bytes"] != 4096}
    shared = ("all_gather", "reduce_scatter", "all_to_all")
    assert sizes == {name: 992 if name in shared else 1000 for name in KINDS}, "62 elements of 4 bytes each"


def test_rank_0_alone_writes_the_table_the_json_and_the_picture(ran: Ran) -> None:
    lines = ran.stdout.splitlines()
    assert lines[0].split()[0] == "collective"
    assert [line.split()[0] for line in lines[1:]] == [name for name in KINDS for _ in range(2)]
    assert {line.split()[-1] for line in lines[1:]} == {"true"}
    assert (ran.folder / "comm.png").read_bytes().startswith(b"\x89PNG\r\n")
    assert sorted(path.name for path in ran.folder.rglob("*")) == ["comm.json", "comm.png", "new"]


def test_progress_is_plain_lines_on_stderr(ran: Ran) -> None:
    assert ran.stderr.count("world: 4 ranks on 1 node") == 1
    for name in KINDS:
        assert ran.stderr.count(f"\n{name} on 4 ranks, 4 a node: 2 sizes, ") == 1
    assert "\r" not in ran.stderr


def test_the_json_says_where_with_what_and_over_what_it_was_measured(ran: Ran) -> None:
    result = ran.result
    assert result["name"] == "comm"
    assert {"torch", "ddp_hpc"} <= set(result["versions"])
    settings = result["settings"]
    assert [settings[k] for k in ("ranks", "nodes", "backend", "device")] == [4, 1, "gloo", "cpu"]
    assert result["machine"]["cores"] >= 1
    assert result["transport"]["interfaces"] == ["lo"]
    assert "gloo over TCP, told to listen on 127.0.0.1 of lo" in result["transport"]["line"]


# What is wrong is found.


def test_one_flipped_element_on_one_rank_under_mpiexec_is_found_and_named(tmp_path: Path) -> None:
    argv = ["-m", PLANTED, "flip:all_reduce:2", *SMALL, "--collectives", "all_reduce,broadcast"]
    done = run([*start(4), *argv, "--json", "comm.json"], tmp_path)
    assert done.returncode == 1
    found = "rank 2 has 1 of 1,024 elements wrong, the first at 7: "
    assert f"wrong result: all_reduce of 4.0 KiB on 4 ranks, 4 a node: {found}" in done.stderr
    errors = [line for line in done.stderr.splitlines() if "error: " in line]
    assert len(errors) == 1
    assert "error: wrong results in 1 of 2 rows, named above" in errors[0]
    assert [row["correct"] for row in rows_of(tmp_path / "comm.json")] == [False, True]
    assert [line.split()[-1] for line in done.stdout.splitlines()[1:]] == ["FALSE", "true"]


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        ("swap:all_gather:1", "rank 1 has 512 of 1,024 elements wrong, the first at 256: "),
        ("late:reduce:0", "rank 0 has 1 of 1,024 elements wrong, the first at 0: 0 instead of "),
        ("flip:reduce_scatter:3", "rank 3 has 1 of 256 elements wrong, the first at 7: "),
        ("flip:all_to_all_single:1", "rank 1 has 1 of 1,024 elements wrong, the first at 7: "),
        ("flip:broadcast:0", "rank 0 has 1 of 1,024 elements wrong, the first at 7: "),
    ],
)
def test_swapped_blocks_and_faults_that_come_late_are_found_too(
    tmp_path: Path, forks: Forks, fault: str, found: str
) -> None:
    name = fault.split(":")[1].removesuffix("_single")
    codes, job = forked(forks, tmp_path, fault, *SMALL, "--collectives", name)
    assert codes == [1] * 4
    assert f"wrong result: {name} of 4.0 KiB on 4 ranks, 4 a node: {found}" in job.words()
    assert len(job.errors()) == 1


def test_what_the_backend_cannot_do_is_a_line_without_a_row(tmp_path: Path, forks: Forks) -> None:
    options = [*SMALL, "--collectives", "reduce_scatter,broadcast", "--json", "comm.json"]
    codes, job = forked(forks, tmp_path, "refuse:reduce_scatter:all", *options)
    assert codes == [0] * 4, job.words()
    line = "reduce_scatter of 4.0 KiB on 4 ranks, 4 a node: left out, and what is larger: gloo says: "
    assert f"{line}ProcessGroupGloo does not support this\n" in job.words()
    assert [row["name"] for row in rows_of(tmp_path / "comm.json")] == ["broadcast"]


def test_nothing_measured_at_all_is_a_failure(tmp_path: Path, forks: Forks) -> None:
    options = [*SMALL, "--collectives", "reduce_scatter", "--json", "comm.json"]
    codes, job = forked(forks, tmp_path, "refuse:reduce_scatter:all", *options)
    assert codes == [1] * 4
    assert "error: nothing was measured: gloo does nothing of what was asked for" in job.errors()[0]
    assert not (tmp_path / "comm.json").exists()


def test_an_error_of_one_rank_alone_ends_all_and_names_it(tmp_path: Path, forks: Forks) -> None:
    codes, job = forked(forks, tmp_path, "refuse:all_reduce:2", *SMALL, "--collectives", "all_reduce")
    assert codes == [1] * 4
    (line,) = job.errors()
    assert "all_reduce of 4.0 KiB on 4 ranks, 4 a node: rank 2 failed alone: ProcessGroupGloo does" in line


def test_a_rank_that_is_stopped_in_a_call_ends_the_job_and_is_named(tmp_path: Path, forks: Forks) -> None:
    options = [*SMALL, "--collectives", "all_reduce", "--hang-timeout", "1"]
    job = forks.start("stop:all_reduce:2", *options, cwd=tmp_path, ranks=4, program=PLANTED)
    end_s = time.monotonic() + 30
    while not job.errors() and time.monotonic() < end_s:
        time.sleep(0.05)
    job.kill()  # a stopped process hears nothing else
    job.wait()
    (line,) = job.errors()
    assert "error: " in line
    assert "rank 2 on " in line
    assert "its process is stopped" in line


def test_a_rank_that_is_killed_in_a_call_ends_the_job_and_is_named(tmp_path: Path, forks: Forks) -> None:
    codes, job = forked(forks, tmp_path, "kill:all_reduce:2", *SMALL, "--collectives", "all_reduce")
    assert codes == [1, 1, -9, 1]
    (line,) = job.errors()
    assert "error: rank 2 on " in line
    assert " is gone: " in line


# Groups of ranks.


def test_one_rank_a_node_is_measured_beside_all_in_one_run(tmp_path: Path, forks: Forks) -> None:
    options = [*SMALL, "--ranks-per-node", "1,2,all", "--json", "comm.json", "--collectives"]
    names = ["all_reduce", "reduce", "all_to_all", "send_recv"]
    codes, job = forked(forks, tmp_path, "two_nodes", *options, ",".join(names))
    assert codes == [0] * 4, job.words()
    found = [(row["name"], row["ranks"], row["ranks_per_node"]) for row in rows_of(tmp_path / "comm.json")]
    assert found == [(name, *group) for group in ((2, 1), (4, 2)) for name in names]
    assert all(row["correct"] for row in rows_of(tmp_path / "comm.json"))
    assert "note: --ranks-per-node all: the same ranks as before: left out" in job.words()


# Gradients of a model.


def test_the_buckets_of_a_model_and_what_a_step_spends_in_them(tmp_path: Path, forks: Forks) -> None:
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n"
        "def net(width):\n"
        "    return nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(3)])\n"
    )
    options = [*QUICK, "--buckets-of", "mine:net", "--model-option", "width=512", "--json", "comm.json"]
    codes, job = forked(forks, tmp_path, "none", *options, "--picture", "comm.svg")
    assert codes == [0] * 4, job.words()
    rows = rows_of(tmp_path / "comm.json")
    assert [(row["name"], row["bytes"]) for row in rows] == [("bucket_0", 2**20), ("bucket_1", 2**21)]
    (total,) = json.loads((tmp_path / "comm.json").read_text())["gradients"]
    assert total["num_buckets"] == 2
    assert total["bytes"] == 3 * 2**20
    assert total["step_us"] == pytest.approx(sum(row["median_us"] for row in rows))
    line = f"a step spends {total['step_us'] / 1000:,.1f} ms in all_reduce if nothing of it is hidden"
    assert f"mine:net on 4 ranks: 3.0 MiB of gradients in 2 buckets: {line}" in job.words()
    assert (tmp_path / "comm.svg").exists()


# A baseline.


def test_rows_that_are_slower_than_the_baseline_fail_by_name(tmp_path: Path, forks: Forks, ran: Ran) -> None:
    result = ran.result
    for row in result["rows"]:
        row["median_us"] *= 1e-3 if row["name"] == "all_gather" else 1e3
    (tmp_path / "before.json").write_text(json.dumps(result))
    options = [*SMALL, "--collectives", "all_reduce,all_gather", "--baseline", "before.json"]
    codes, job = forked(forks, tmp_path, "none", *options, "--json", "now.json")
    assert codes == [1] * 4
    (line,) = job.errors()
    assert (
        "error: 1 row is slower than --baseline before.json by more than 20%: all_gather of 4.0 KiB" in line
    )
    assert len(rows_of(tmp_path / "now.json")) == 2, "what was measured is kept"


def test_a_run_that_is_as_fast_as_its_baseline_is_well(tmp_path: Path, forks: Forks, ran: Ran) -> None:
    options = [*SMALL, "--baseline", ran.folder / "new/comm.json", "--tolerance", "1000000"]
    codes, job = forked(forks, tmp_path, "none", *options)
    assert codes == [0] * 4, job.words()


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda result: result["settings"].update(ranks=8), "ranks 8 (here 4)"),
        (lambda result: result["settings"].update(backend="nccl"), "backend nccl (here gloo)"),
        (lambda result: result["rows"].clear(), "none of the rows asked for"),
    ],
)
def test_a_baseline_of_something_else_is_refused_by_one_line(
    tmp_path: Path, forks: Forks, ran: Ran, spoil: Any, said: str
) -> None:
    result = ran.result
    spoil(result)
    (tmp_path / "before.json").write_text(json.dumps(result))
    codes, job = forked(forks, tmp_path, "none", *SMALL, "--baseline", "before.json")
    assert codes == [2] * 4
    (line,) = job.errors()
    assert "error: --baseline before.json: " in line
    assert said in line


def test_a_baseline_is_not_overwritten(tmp_path: Path, forks: Forks, ran: Ran) -> None:
    before = (ran.folder / "new/comm.json").read_bytes()
    (tmp_path / "before.json").write_bytes(before)
    (tmp_path / "link.json").symlink_to("before.json")
    options = [*SMALL, "--baseline", "before.json", "--json", "link.json"]
    codes, job = forked(forks, tmp_path, "none", *options)
    assert codes == [2] * 4
    assert "--json link.json: is the --baseline and would be overwritten" in job.errors()[0]
    assert (tmp_path / "before.json").read_bytes() == before


# What is refused.


def test_one_rank_alone_is_told_how_to_start_more(tmp_path: Path) -> None:
    done = run([*start(1), "-m", "ddp_hpc", "bench", "comm", "--json", "comm.json"], tmp_path)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: bench comm was started as 1 rank and needs 2 or more; ")
    assert "mpiexec -n 4 ddp-hpc bench comm" in line
    assert not (tmp_path / "comm.json").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--collectives", "all_redoce"], 'unknown (did you mean "all_reduce"?)'),
        (["--collectives", ""], "--collectives '': unknown"),
        (["--bytes", "3MB"], "--bytes '3MB' is no size in bytes"),
        (["--bytes", "0"], "--bytes '0' is no size in bytes"),
        (["--bytes", "-1"], "is no size in bytes"),
        (["--min-bytes", "2MiB", "--max-bytes", "1MiB"], "--min-bytes 2097152 is more than --max-bytes"),
        (["--bytes", "1KiB", "--factor", "2"], "leave --factor out"),
        (["--ranks-per-node", "0"], "--ranks-per-node 0: numbers above 0"),
        (["--ranks-per-node", "1,,all"], "--ranks-per-node 1,,all: numbers above 0"),
        (["--seconds", "nan"], "--seconds nan: has to be 0 or more, and finite"),
        (["--tolerance", "-1"], "--tolerance -1.0: has to be 0 or more"),
        (["--model-option", "width=3"], "--model-option goes with --buckets-of"),
        (["--buckets-of", "linear", "--bytes", "1KiB"], "leave --bytes out"),
        (["--buckets-of", "linear", "--bucket-mib", "0"], "--bucket-mib 0.0: has to be above 0"),
        (["--buckets-of", "linear", "--src-shape", ""], "shape '' is not a list of sizes"),
        (["--timeout", "0"], "--timeout 0.0: has to be above 0"),
    ],
)
def test_a_wrong_option_is_refused_before_anything_is_started(options: list[str], said: str) -> None:
    done = CliRunner().invoke(cli, ["bench", "comm", *options])
    assert isinstance(done.exception, RequestError)
    assert said in str(done.exception)


@pytest.mark.parametrize("options", [["--bytes", "3MB"], ["--factor", "1"]])
def test_of_a_wrong_line_that_all_ranks_got_rank_0_alone_tells(
    monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    done = CliRunner().invoke(cli, ["bench", "comm", *options])
    assert done.exit_code == 2
    assert done.output == ""


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--bytes", "1PiB"], "1.0 PiB at once need 20.0 PiB of memory on a node, and "),
        (["--ranks-per-node", "1"], "--ranks-per-node 1: one node, so that is one rank alone"),
        (["--buckets-of", "transfomer"], '--buckets-of transfomer: unknown (did you mean "transformer"?)'),
        (["--buckets-of", "classifier"], "--buckets-of classifier needs --data"),
        (["--buckets-of", "no_such:net"], "--buckets-of no_such:net: there is no module no_such"),
        (["--json", "precious.txt"], "--json precious.txt: exists and is no JSON and would be overwritten"),
        (["--baseline", "precious.txt"], "--baseline precious.txt: is no JSON of bench comm"),
        (["--backend", "nccl", "--device", "auto"], "--backend nccl needs CUDA devices"),
    ],
)
def test_what_cannot_be_done_here_ends_all_ranks_with_one_line(
    tmp_path: Path, forks: Forks, no_gpu: None, options: list[str], said: str
) -> None:
    (tmp_path / "precious.txt").write_text("precious")
    codes, job = forked(forks, tmp_path, "none", *options)
    assert codes == [2] * 4, job.words()
    (line,) = job.errors()
    assert said in line
    assert (tmp_path / "precious.txt").read_text() == "precious"


def test_the_examples_of_the_help_are_command_lines() -> None:
    text = CliRunner().invoke(cli, ["bench", "comm", "--help"]).output
    words = [shlex.split(line) for line in text.splitlines() if " bench comm" in line and "Usage" not in line]
    examples = [line[line.index("comm") + 1 :] for line in words if "ddp-hpc" in line or "ddp_hpc" in line]
    assert len(examples) == 7
    for options in examples:
        bench_comm.make_context("comm", options)
