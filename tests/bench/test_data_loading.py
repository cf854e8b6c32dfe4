"""`ddp-hpc bench io`: every row reads the right samples, and the numbers of a run are consistent."""

from __future__ import annotations

import json
import shlex
import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from data_gen import Recipe, generate
from ddp_hpc.base.errors import RequestError
from ddp_hpc.bench.data_loading import benchmark as io
from ddp_hpc.bench.data_loading.benchmark import FORMATS, IoBench
from ddp_hpc.cli import cli
from ddp_hpc.commands.bench import io as bench_io
from ddp_hpc.data.open_file import open_samples
from ddp_hpc.training.input.batch_loader import batches_at_once
from tests.conftest import Launch

RECIPE = Recipe(num_samples=24, src_shape=(3,), tgt_shape=(2, 5))
SAMPLE_BYTES = (3 + 2 * 5) * 4
TIMES = ["median_us", "p99_us", "max_us", "bytes_per_s", "vs_naive_hdf5", "vs_memory", "vs_memcpy"]
FIELDS = ["name", "format", "access", "batch_size", "workers", "ahead", "batches", "bytes", *TIMES]
BASE = ["memcpy", "memory", "memory_indexed", "naive_hdf5", "h5py_batch"]


def tiny(**options: Any) -> IoBench:
    """Returns options for one batch per turn."""
    return IoBench(**{"recipe": RECIPE, "batch_sizes": (8,), "rounds": 2, "seconds": 0.0, **options})


def invoke(*args: str) -> Any:
    """Runs `ddp-hpc bench io ARGS` in this process."""
    return CliRunner().invoke(cli, ["bench", "io", *args])


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return io.run(tiny(accesses=("shuffled", "sequential"), batch_sizes=(8, 5)))


def test_every_row_reads_the_samples_in_order_repeatedly(tmp_path: Path) -> None:
    order = list(np.random.default_rng(0).permutation(24).reshape(3, 8))
    with ExitStack() as stack:
        files = io.make_files(tiny(directory=tmp_path), stack)
        samples = open_samples(files["hdf5"])
        arrays = samples.read(np.arange(24))
        assert len(np.unique(arrays[0])) == arrays[0].size, (
            "all values must differ, or the test would prove little"
        )
        sources = io.all_sources(tiny(), files, arrays, samples, 8)
        assert [source.name for source in sources[: len(BASE)]] == BASE
        assert {source.format for source in sources[len(BASE) :]} == set(FORMATS)
        for source in sources:
            batches = source.open(order)
            for numbers in [*order, *order]:
                # memcpy reads any samples, and h5py_batch reads them in ascending order.
                expected = np.sort(numbers) if source.name == "h5py_batch" else numbers
                found = [tensor.numpy().copy() for tensor in next(batches)]
                if source.name == "memcpy":
                    expected = np.flatnonzero(np.isin(arrays[0][:, 0], found[0][:, 0]))
                    assert len(expected) == 8
                for array, values in zip(arrays, found, strict=True):
                    np.testing.assert_array_equal(values, array[expected], err_msg=source.name)
            batches.close()


def test_each_row_has_all_fields_and_they_are_consistent(result: dict[str, Any]) -> None:
    assert len(result["rows"]) == 4 * (len(BASE) + 2 * len(FORMATS))
    for row in result["rows"]:
        assert list(row) == FIELDS
        assert row["bytes"] == row["batch_size"] * SAMPLE_BYTES
        is_own_loader = row["name"] not in BASE
        at_once = batches_at_once(row["bytes"]) if is_own_loader else 1
        assert row["batches"] == 2 * at_once * max(1, 2 * row["ahead"]), "one time for each of two rounds"
        assert 0 < row["median_us"] <= row["p99_us"] <= row["max_us"]
        assert row["bytes"] / row["max_us"] <= row["bytes_per_s"] / 1e6 * 1.0001


def test_the_ratios_are_computed_from_the_medians_of_the_same_case(result: dict[str, Any]) -> None:
    medians = {(row["name"], row["access"], row["batch_size"]): row["median_us"] for row in result["rows"]}
    for row in result["rows"]:
        for base in ("naive_hdf5", "memory", "memcpy"):
            other = medians[base, row["access"], row["batch_size"]]
            assert row[f"vs_{base}"] == pytest.approx(row["median_us"] / other)
        assert row["name"] != "memcpy" or row["vs_memcpy"] == 1


def test_the_result_describes_machine_and_settings(result: dict[str, Any]) -> None:
    assert result["name"] == "io"
    assert result["created"].endswith("+00:00")
    assert {"torch", "numpy", "h5py"} <= set(result["versions"])
    assert result["machine"]["cores"] >= 1
    assert result["machine"]["torch_threads"] == 1
    assert result["settings"]["readers"]["hdf5"] == "hdf5 memory map"
    assert result["settings"]["readers"]["hdf5_gzip"] == "hdf5 chunked"
    assert json.loads(json.dumps(result)) == result, "plain JSON"


def test_the_files_are_created_in_the_given_directory_and_removed(tmp_path: Path) -> None:
    (tmp_path / "contiguous.h5").write_text("precious")
    io.run(tiny(directory=tmp_path, ahead=(0,)))
    assert [path.name for path in tmp_path.iterdir()] == ["contiguous.h5"]
    assert (tmp_path / "contiguous.h5").read_text() == "precious"


def test_a_given_file_is_read_by_the_rows_that_support_it(tmp_path: Path) -> None:
    generate(RECIPE, tmp_path / "mine.pt")
    before = (tmp_path / "mine.pt").read_bytes()
    result = io.run(tiny(data=tmp_path / "mine.pt", ahead=(0,)))
    assert [row["name"] for row in result["rows"]] == [*BASE[:3], "pt"]
    assert {row["vs_naive_hdf5"] for row in result["rows"]} == {None}
    assert "  -  " in io.table(result).splitlines()[1]
    assert (tmp_path / "mine.pt").read_bytes() == before


def test_data_too_large_for_memory_is_read_only_from_the_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(io, "available_bytes", lambda: 3 * RECIPE.num_bytes)
    monkeypatch.setattr(io, "_MEMCPY_BYTES", 0)
    result = io.run(tiny(batch_sizes=(1,), formats=("hdf5",), ahead=(0,)))
    assert [row["name"] for row in result["rows"]] == ["memcpy", "naive_hdf5", "h5py_batch", "hdf5"]
    assert "does not fit into memory" in capsys.readouterr().err


def test_batches_that_do_not_fit_into_memory_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io, "available_bytes", lambda: 8 * SAMPLE_BYTES)
    with pytest.raises(RequestError, match=r"batches of 8 samples for .* use smaller batches"):
        io.run(tiny())


def test_files_that_do_not_fit_on_the_disk_are_an_error(tmp_path: Path) -> None:
    done = invoke("--num-samples", "1000000000000", "--dir", str(tmp_path))
    assert isinstance(done.exception, RequestError)
    assert "5 files of 38.2 PiB do not fit into" in str(done.exception)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--formats", "hdf5,safetensor"], "unknown format 'safetensor' (did you mean \"safetensors\"?)"),
        (["--src-shape", "0,5"], "invalid shape '0,5'"),
        (["--dtype", "float33"], 'did you mean "float32"?'),
        (["--num-samples", "8"], "--batch-size 32 exceeds the 8 samples"),
        (["--data", "none.h5"], "none.h5"),
        (["--data", "x.h5", "--num-samples", "9"], "cannot be combined with options for synthetic data"),
        (["--data", "x.h5", "--dir", "."], "cannot be combined with options for synthetic data"),
        (["--json", "/dev/null/io.json"], "cannot be written"),
    ],
)
def test_an_invalid_request_is_rejected_before_anything_is_measured(args: list[str], message: str) -> None:
    done = invoke("--src-shape", "3", "--tgt-shape", "3", *args) if "--data" not in args else invoke(*args)
    assert isinstance(done.exception, RequestError)
    assert message in str(done.exception)
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("args"),
    [
        ["--batch-size", "0"],
        ["--workers", "1000000"],
        ["--access", "random"],
        ["--dir", "/nowhere"],
    ],
)
def test_a_number_out_of_range_is_a_usage_error(args: list[str]) -> None:
    done = invoke(*args)
    assert done.exit_code == 2
    assert f"Invalid value for '{args[0]}'" in done.stderr


def test_the_examples_in_the_help_are_valid_and_cover_large_and_small_samples(tmp_path: Path) -> None:
    text = invoke("--help").stdout
    examples = [shlex.split(line)[3:] for line in text.splitlines() if "ddp-hpc bench io --" in line]
    assert len(examples) >= 5
    for arguments in examples:
        existing = [str(tmp_path) if word == "/lustre/me" else word for word in arguments]
        bench_io.make_context("io", existing)
    assert "10 MB" in text
    assert "256 bytes" in text


def test_a_run_writes_the_table_and_the_json(launch: Launch, tmp_path: Path) -> None:
    shapes = [
        "--num-samples",
        "64",
        "--src-shape",
        "4",
        "--tgt-shape",
        "4",
        "--rounds",
        "1",
        "--seconds",
        "0",
    ]
    files = ["--json", tmp_path / "new/io.json"]
    ways = ["--formats", "hdf5", "--workers", "0", "--workers", "1"]
    argv = [sys.executable, "-m", "ddp_hpc", "bench", "io", *shapes, *files, *ways]
    done = launch(argv, cwd=tmp_path, env={"TMPDIR": str(tmp_path)}, timeout_s=60)
    assert done.exit_code == 0, done.stderr
    names = [*BASE, "hdf5", "hdf5 ahead=2", "hdf5 workers=1"]
    rows = json.loads((tmp_path / "new/io.json").read_text())["rows"]
    assert [row["name"] for row in rows] == names
    assert [line.split("  ")[0] for line in done.stdout.splitlines()[1:]] == names
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


@pytest.mark.parametrize(
    ("signum", "exit_code"),
    [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.soak)],
)
def test_a_run_that_is_interrupted_removes_its_files(
    launch: Launch, tmp_path: Path, signum: signal.Signals, exit_code: int
) -> None:
    argv = [sys.executable, "-m", "ddp_hpc", "bench", "io", "--dir", tmp_path, "--seconds", "60"]
    process = launch.start([*argv, "--formats", "hdf5", "--json", tmp_path / "io.json"])
    assert process.stderr is not None
    while (line := process.stderr.readline()) and "batches of 32" not in line:
        pass
    assert list(tmp_path.glob("*/contiguous.h5")), "the measurement is running"
    process.send_signal(signum)
    assert launch.end(process).exit_code == exit_code
    assert not list(tmp_path.iterdir())
