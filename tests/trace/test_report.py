"""The command `ddp-hpc report`: its output, its files and its errors."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.trace.made import annotation, event, step, write

REPORT = [sys.executable, "-m", "ddp_hpc", "report"]


def _run(directory, size=2, **parts):
    for rank in range(size):
        events = [e for i in range(3) for e in step(i + 2, 1000.0 * i, **parts)]
        write(directory / f"rank{rank:05d}-of-{size:05d}.json.gz", events, rank, size)
    return directory


def _report(*arguments, cwd):
    return subprocess.run(
        [*REPORT, *map(str, arguments)], cwd=cwd, capture_output=True, text=True, timeout=60
    )


def test_the_report_for_a_terminal(tmp_path):
    ended = _report(_run(tmp_path / "run"), cwd=tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert (
        ended.stdout
        == """\
run: 2 of 2 ranks

A step takes 350 us: 57% backward, 29% forward, 11% exposed communication, 3% waiting for data.
What would help most: a step of 350 us would be shorter by at most 11% without exposed communication \
(a bound: what fits behind computation can be hidden).
Collectives take 90 us per step on a rank, of which 90 us is the transfers; 56% of the communication is \
hidden behind computation. The longest is all_reduce of 3.9 KiB: 90 us per step in 1 call (median 90 us), of \
which 90 us is the transfer, with a bus bandwidth of 0.0444 GB/s.

ranks: 2 of 2
hosts: node1
device: cpu; no activity of another device
steps: 3 (2 to 4)
mean step: 350 us
input of the first layer on rank 0: shapes were not recorded (record_shapes=True)
memory: not recorded (profile_memory=True)
data loading: 10 us per step
metadata of the trace: backend gloo
Python functions: none recorded (with_stack=True records them)

mean step, ms  step  data  forward  backward  comm exposed  comm hidden
run            0.35  0.01     0.10      0.20          0.04         0.05

ranks by step without comm, ms  step without comm  step  data  forward  backward  comm exposed  comm hidden
rank 0                                       0.31  0.35  0.01     0.10      0.20          0.04         0.05
rank 1                                       0.31  0.35  0.01     0.10      0.20          0.04         0.05

steps, ms  it is the  step  most ms on a rank  rank  data  forward  backward  comm exposed  comm hidden
step 2                0.35               0.35     1  0.01     0.10      0.20          0.04         0.05
step 3                0.35               0.35     1  0.01     0.10      0.20          0.04         0.05
step 4                0.35               0.35     1  0.01     0.10      0.20          0.04         0.05
mean               -  0.35                  -     -  0.01     0.10      0.20          0.04         0.05

collectives per step     size  ranks  calls  total ms  exposed ms  median ms  median transfer ms  busbw GB/s\
  slowest ms  on rank, step
all_reduce            3.9 KiB      2      1      0.09        0.04       0.09                0.09       0.044\
        0.09           0, 2

annotations and modules per rank and step  calls  host ms  most ms on a rank  rank
backward                                       1     0.24               0.24     1
forward                                        1     0.10               0.10     1
data                                           1     0.01               0.01     1

operators (host) per rank and step  calls  self ms  total ms  most self ms on a rank  rank
MmBackward                              1     0.20      0.20                    0.20     1
aten::mm                                1     0.10      0.10                    0.10     1
"""
    )


def test_a_comparison_begins_with_the_changes(tmp_path):
    _run(tmp_path / "new", data=10)
    _run(tmp_path / "old", data=510)
    ended = _report("new", "--compare", "old", cwd=tmp_path)
    assert ended.stdout.splitlines()[2] == (
        "new: a step takes 350 us, 500 us (59%) less than in old (850 us). "
        "Shorter: waiting for data by 500 us."
    )


def test_json_contains_all_numbers(tmp_path):
    _run(tmp_path / "run")
    assert _report("run", "--json", "new/report.json", cwd=tmp_path).returncode == 0
    document = json.loads((tmp_path / "new/report.json").read_text())
    capture = document["captures"][0]
    assert (document["name"], capture["world_size"], len(capture["ranks"])) == ("report", 2, 2)
    assert capture["mean"]["wall_s"] == pytest.approx(350e-6)
    assert capture["collectives"][0]["busbw_bytes_per_s"] == pytest.approx(4000 / 90e-6)
    second = _report("run", "--json", "new/report.json", cwd=tmp_path)
    assert second.returncode == 0, "its own file is overwritten"


def test_with_a_page_only_the_names_of_the_files_are_printed(tmp_path):
    _run(tmp_path / "run")
    files = ["-o", "report.html", "--perfetto", "merged.json.gz", "--json", "report.json"]
    ended = _report("run", *files, cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (0, "")
    assert ended.stderr.splitlines() == [
        "report.html: the report on 2 ranks",
        "merged.json.gz: the merged traces",
        "report.json: the numbers of the report",
    ]
    assert gzip.decompress((tmp_path / "merged.json.gz").read_bytes()).startswith(b'{"traceEvents":[')
    assert (tmp_path / "report.html").read_text().startswith("<!DOCTYPE html>")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "no such directory: nowhere"),
        (["run", "--compare", "nowhere"], "no such directory: nowhere"),
        (["run", "--json", "run"], "--json run is a directory"),
        (["run", "--json", "notes.txt"], "exists and was not written by this option"),
        (["run", "-o", "notes.txt"], "exists and was not written by this option"),
        (["run", "-o", "run/rank00000-of-00002.json.gz"], "exists and was not written by this option"),
        (["run", "--json", "a", "-o", "a"], "name the same file"),
        (["run", "--processes", "0"], "0"),
    ],
)
def test_invalid_requests_are_rejected_and_nothing_is_overwritten(tmp_path, arguments, message):
    _run(tmp_path / "run")
    (tmp_path / "notes.txt").write_text("mine")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    ended = _report(*arguments, cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert message in ended.stderr
    assert len(ended.stderr.splitlines()) <= 4
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_control_characters_in_names_are_replaced(tmp_path):
    events = [annotation("ProfilerStep#0", 0, 10), event("cpu_op", "\x1b[2J\x07evil\nline" + "x" * 500, 0, 5)]
    write(tmp_path / "t.json", events, host="\x1b]0;me\x07")
    ended = _report("t.json", cwd=tmp_path)
    assert ended.returncode == 0
    assert "\x1b" not in ended.stdout
    assert "\x07" not in ended.stdout
    assert max(map(len, ended.stdout.splitlines())) < 250


def test_idle_time_launches_and_critical_path_of_a_device_are_reported(tmp_path):
    events = [annotation("ProfilerStep#3", 0, 400), annotation("forward", 290, 20)]
    events += [event("cuda_runtime", "cudaLaunchKernel", 300, 10, correlation=1)]
    events += [event("kernel", "gemm", 320, 80, correlation=1)]
    write(tmp_path / "t.json", events)
    ended = _report("t.json", "--json", "t.out", cwd=tmp_path)
    assert (
        "A step takes 400 us: 80% idle (75% late launch, 2% launch call, 2% kernel queued), 20% forward."
    ) in ended.stdout
    lines = [" ".join(line.split()) for line in ended.stdout.splitlines()]
    assert "idle device, ms total late launch launch call kernel queued" in lines
    assert "rank 0 0.32 0.30 0.01 0.01" in lines
    assert (
        "launches: 1 calls launch 1 kernels and copies per step, 1 of them late; 0 kernels are shorter than "
        "their call; medians: 10 us for a call, 80 us for a kernel, which starts 10 us after its call, and "
        "a queue of 0, which is empty for 95% of the time"
    ) in ended.stdout
    assert "critical path" not in ended.stdout, "the tables of one stream contain the same"
    (capture,) = json.loads((tmp_path / "t.out").read_text())["captures"]
    assert capture["mean"]["idle_host_s"] == pytest.approx(300e-6)
    assert capture["mean"]["device_idle_s"] == pytest.approx(320e-6)
    assert capture["path"]["rows"][1]["name"] == "gemm"
    assert capture["ranks"][0]["launches"]["num_kernels"] == 1


@pytest.mark.check
def test_ctrl_c_stops_reading_immediately_and_leaves_no_file(tmp_path):
    many = [event("cpu_op", f"op{i % 50}", i, 1, **{"Input Dims": [[i, i]] * 9}) for i in range(150_000)]
    whole = write(tmp_path / "run" / "rank0.json", many, 0, 8).read_text()
    for rank in range(1, 8):
        other = whole.replace('"rank": 0', f'"rank": {rank}', 1)
        (tmp_path / "run" / f"rank{rank}.json").write_text(other)
    process = subprocess.Popen(
        [*REPORT, "run", "--json", "r.json"], cwd=tmp_path, stderr=subprocess.PIPE, start_new_session=True
    )
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    deadline_s = time.monotonic() + 30
    while not (started := children.read_text().split()) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert started, "several processes read"
    os.killpg(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=20)
    assert process.returncode == 130
    assert b"Traceback" not in stderr
    assert not (tmp_path / "r.json").exists()
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


def test_torch_mpi4py_and_h5py_are_not_required(tmp_path):
    _run(tmp_path / "run")
    program = (
        "import sys; sys.modules.update(dict.fromkeys(('torch', 'mpi4py', 'h5py')));"
        "sys.argv[1:] = ['report', 'run']; from ddp_hpc.cli import main; main()"
    )
    ended = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, b"")


@pytest.mark.soak
def test_a_trace_larger_than_the_available_memory_is_read_completely(tmp_path):
    """2.4 GB of events in a process limited to 2 GB of address space, which includes numpy's libraries."""
    arguments = '{"Input Dims":[[128,512],[512,512]],"Input Strides":[[512,1],[512,1]],"Fwd thread id":0}'
    fields = f'"pid":1,"tid":1,"dur":0.9,"args":{arguments}'
    with gzip.open(tmp_path / "t.json.gz", "wt", compresslevel=1) as file:
        file.write('{"distributedInfo":{"rank":0,"world_size":1},"traceEvents":[\n')
        for block in range(600):
            at = range(block * 20_000, (block + 1) * 20_000)
            events = (f'{{"ph":"X","cat":"cpu_op","name":"aten::op{i % 50}","ts":{i},{fields}}}' for i in at)
            file.write((",\n" if block else "") + ",\n".join(events))
        file.write("\n]}")
    limit = "import resource; resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30));"
    program = (
        f"{limit} import sys; sys.argv[1:] = ['report', 't.json.gz']; from ddp_hpc.cli import main; main()"
    )
    ended = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, timeout=220)
    assert ended.returncode == 0, ended.stderr
    assert b"8000000 events after the first 4000000 of their kind were dropped" in ended.stdout
    assert b"aten::op7" in ended.stdout
