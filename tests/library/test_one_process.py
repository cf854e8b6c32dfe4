"""The library in a single process: a world of one rank, and an ordinary Python program."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import h5py
import pytest
import torch
from torch import nn

import ddp_hpc
from ddp_hpc.base.run_outcomes import State
from ddp_hpc.base.run_state import RunState, read_state
from ddp_hpc.data.sample_order import EpochOrder


@pytest.fixture(autouse=True)
def _at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("SLURM_", "PBS_", "PMI", "PALS_", "OMPI_", "DDP_HPC_")):
            monkeypatch.delenv(name)


@contextmanager
def _ends_with(code: int, **options: object) -> Iterator[ddp_hpc.ConnectedWorld]:
    """Runs a block in a world and checks that it ends the process with this exit code."""
    with pytest.raises(SystemExit) as caught, ddp_hpc.distributed(**options) as world:
        yield world
    assert caught.value.code == code


pytestmark = pytest.mark.usefixtures("no_launcher")


def _numbers(num: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(float(num)).unsqueeze(1), torch.zeros(num, 1)


def _linear() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = ddp_hpc.wrap(nn.Linear(1, 1))
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def _train(loader: object, folder: str | None, stop_after: int = 1000, **options: object) -> list[int]:
    """Trains, and returns the steps that were trained."""
    model, optimizer = _linear()
    steps = []
    with ddp_hpc.snapshots(folder, model=model, optimizer=optimizer, loader=loader, **options) as snapshots:
        for batch in loader:
            optimizer.zero_grad()
            (nn.functional.mse_loss(model(batch.src), batch.tgt) * batch.weight).backward()
            optimizer.step()
            steps.append(batch.step)
            if snapshots.step(batch.step) or batch.step == stop_after:
                break
    return steps


# Public names.


def test_importing_the_package_imports_nothing_else() -> None:
    code = "import sys; before = set(sys.modules); import ddp_hpc; print(sorted(set(sys.modules) - before))"
    argv = [sys.executable, "-S", "-c", code]
    root = Path(ddp_hpc.__file__).parents[1]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, env={"PYTHONPATH": str(root)})
    assert done.stdout.strip() == "['ddp_hpc']"


def test_every_public_name_exists_and_others_do_not() -> None:
    for name in ddp_hpc.__all__:
        assert getattr(ddp_hpc, name).__name__ == name
        assert name in dir(ddp_hpc)
    with pytest.raises(AttributeError, match="distribute"):
        _ = ddp_hpc.distribute


def test_a_name_that_needs_torch_names_the_install_command() -> None:
    code = "import sys; sys.modules['torch'] = None; import ddp_hpc; ddp_hpc.wrap"
    root = Path(ddp_hpc.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=False)
    assert "ddp_hpc.wrap needs torch, which is not installed: pip install '.[train]'" in done.stderr


# `distributed`.


def test_a_single_process_is_a_world_of_one() -> None:
    with ddp_hpc.distributed(device="cpu") as world:
        assert (world.rank, world.world_size, world.local_rank) == (0, 1, 0)
        assert (world.node_rank, world.num_nodes, world.is_first) == (0, 1, True)
        assert world.device == torch.device("cpu")
        assert world.sum(torch.ones(2)).tolist() == [1.0, 1.0]
        assert world.gather(torch.ones(2)).shape == (1, 2)
        assert world.broadcast({"a": [1]}) == {"a": [1]}
        world.barrier()


def test_nothing_but_the_script_writes_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    with ddp_hpc.distributed() as world:
        world.say("hello")
    out, err = capsys.readouterr()
    assert out == "hello\n"
    assert err.startswith("world: 1 rank (single)")


def test_in_a_single_process_an_exception_is_raised_unchanged() -> None:
    with pytest.raises(ZeroDivisionError) as caught, ddp_hpc.distributed():
        1 / 0  # noqa: B018
    assert [frame.name for frame in caught.traceback] == [
        "test_in_a_single_process_an_exception_is_raised_unchanged"
    ], "`with` does not change it"


def test_in_a_single_process_an_error_of_the_library_is_one_line_and_its_exit_code(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with _ends_with(2):
        raise ddp_hpc.RequestError("no such thing")
    assert capsys.readouterr().err.splitlines()[-1] == "error: no such thing"


def test_signal_handlers_are_restored_after_the_world() -> None:
    before = [signal.getsignal(sig) for sig in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)]
    for fails in (False, True):
        try:
            with ddp_hpc.distributed():
                assert signal.getsignal(signal.SIGTERM) != before[0]
                assert not fails
        except AssertionError:
            assert fails
        assert [signal.getsignal(sig) for sig in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)] == before


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"backend": "ncl"}, "backend 'ncl' is unknown (did you mean \"nccl\"?). Use one of auto, nccl,"),
        ({"device": "gpu"}, "device 'gpu' is unknown"),
        ({"timeout_s": 0}, "timeout_s must be greater than 0 (got 0)"),
        ({"discovery": "slurm"}, "srun"),
    ],
)
def test_an_invalid_option_is_one_line_and_exit_code_2(
    options: dict[str, object], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught, ddp_hpc.distributed(**options):
        pass
    assert caught.value.code == 2
    assert words in capsys.readouterr().err


def test_only_one_world_can_exist_at_a_time(capsys: pytest.CaptureFixture[str]) -> None:
    with _ends_with(2), ddp_hpc.distributed():
        pass
    assert "is already active" in capsys.readouterr().err
    with ddp_hpc.distributed():
        pass  # consecutive worlds are allowed


def test_a_world_cannot_be_created_in_a_thread() -> None:
    errors = []

    def open_one() -> None:
        try:
            with ddp_hpc.distributed():
                pass
        except ddp_hpc.RequestError as error:
            errors.append(str(error))

    thread = threading.Thread(target=open_one)
    thread.start()
    thread.join()
    assert "main thread" in errors[0]


def test_outside_of_a_world_each_function_raises_an_error_that_names_the_world() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(ddp_hpc.RequestError, match=r"wrap\(\) was called outside"):
        ddp_hpc.wrap(model)
    manager = ddp_hpc.snapshots("x", model=model, optimizer=optimizer)
    with pytest.raises(ddp_hpc.RequestError, match=r"outside of `with ddp_hpc\.distributed"), manager:
        pass


# `wrap`.


def test_in_a_single_process_the_model_is_returned_unwrapped() -> None:
    model = nn.Linear(2, 1)
    with ddp_hpc.distributed():
        assert ddp_hpc.wrap(model) is model


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"strategy": "dpd"}, 'did you mean "ddp"?'),
        ({"strategy": "pp"}, "python -m ddp_hpc.train --model package.module:factory --strategy pp"),
        ({"bucket_cap_mb": 25}, "wrap(..., bucket_cap_mb=) is unknown"),
        ({"cpu_offload": True}, "error: cpu_offload works with strategy fsdp, not with ddp"),
        ({"mesh": "dp=2"}, "error: mesh dp=2 needs 2 ranks, but 1 was started"),
        ({"amp": "bf16"}, "use torch.autocast for the forward pass"),
    ],
)
def test_an_invalid_strategy_or_option_is_refused(
    options: dict[str, object], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with _ends_with(2):
        ddp_hpc.wrap(nn.Linear(2, 1), **options)
    assert words in capsys.readouterr().err


# world.loader.


def test_batches_follow_the_order_of_the_epoch() -> None:
    with ddp_hpc.distributed() as world:
        loader = world.loader(_numbers(10), batch_size=4, seed=3, epochs=2)
        assert (len(loader), loader.num_steps, loader.num_samples) == (6, 6, 10)
        batches = list(loader)
    assert [(b.step, b.epoch, b.ends_epoch) for b in batches] == [
        (1, 1, False), (2, 1, False), (3, 1, True), (4, 2, False), (5, 2, False), (6, 2, True),
    ]  # fmt: skip
    for epoch in (0, 1):
        taken = torch.cat([b.src for b in batches if b.epoch == epoch + 1]).flatten().tolist()
        assert taken == EpochOrder(10, 3, epoch).take(0, 10).tolist()
    assert {b.weight for b in batches} == {1.0}


def test_a_batch_that_a_script_keeps_is_not_overwritten() -> None:
    with ddp_hpc.distributed() as world:  # long enough for the reader to reuse its buffers
        batches = list(world.loader(_numbers(1000), batch_size=2))
    assert (
        torch.cat([b.src for b in batches]).flatten().tolist()
        == EpochOrder(1000, 0, 0).take(0, 1000).tolist()
    )


def test_a_loader_can_start_at_a_later_step() -> None:
    with ddp_hpc.distributed() as world:
        whole = list(world.loader(_numbers(10), batch_size=4, epochs=3))
        rest = list(world.loader(_numbers(10), batch_size=4, epochs=3, start_step=4))
    assert [b.step for b in rest] == [5, 6, 7, 8, 9]
    for ours, theirs in zip(rest, whole[4:], strict=True):
        assert torch.equal(ours.src, theirs.src)


@pytest.mark.parametrize(
    ("options", "epochs"),
    [
        ({"max_steps": 7}, [1, 1, 1, 2, 2, 2, 3]),
        ({"max_steps": 7, "epochs": 2}, [1, 1, 1, 2, 2, 2]),
        ({"max_steps": 7, "start_step": 5}, [2, 3]),
        ({"max_steps": 7, "start_step": 8}, []),
    ],
)
def test_a_loader_can_end_after_a_number_of_steps(options: dict[str, int], epochs: list[int]) -> None:
    with ddp_hpc.distributed() as world:
        loader = world.loader(_numbers(10), batch_size=4, **options)
        assert len(loader) == len(epochs)
        assert [batch.epoch for batch in loader] == epochs
        assert len(loader) == 0


def test_a_run_that_is_signaled_in_its_last_step_is_complete(tmp_path: Path) -> None:
    for _ in range(2):  # a completed run is not continued
        with ddp_hpc.distributed() as world:
            model, optimizer = _linear()
            loader = world.loader(_numbers(10), batch_size=4, max_steps=4)
            with ddp_hpc.snapshots("run", model=model, optimizer=optimizer, loader=loader) as snapshots:
                for batch in loader:
                    if batch.step == 4:
                        os.kill(os.getpid(), signal.SIGUSR1)
                    assert not snapshots.step(batch.step)
            assert not world.stopped
        assert read_state(tmp_path / "run") == RunState(State.DONE, 4, "training complete")


def test_a_second_loop_over_all_epochs_is_refused_and_not_empty(capsys: pytest.CaptureFixture[str]) -> None:
    with _ends_with(2) as world:
        loader = world.loader(_numbers(10), batch_size=4)
        for _ in range(2):
            for _ in loader:
                pass
    assert "use world.loader(..., epochs=N)" in capsys.readouterr().err


def test_a_loop_after_a_break_continues_with_the_next_batch() -> None:
    with ddp_hpc.distributed() as world:
        loader = world.loader(_numbers(10), batch_size=4, epochs=2)
        first = next(step for step in (b.step for b in loader))
        assert [first, *(b.step for b in loader)] == [1, 2, 3, 4, 5, 6]


def test_a_loader_reads_a_file(tmp_path: Path) -> None:
    src, tgt = _numbers(10)
    torch.save({"src": src, "tgt": tgt}, tmp_path / "mine.pt")
    with ddp_hpc.distributed() as world:
        [batch] = world.loader("mine.pt", batch_size=10, shuffle=False)
    assert torch.equal(batch.src, src)


@pytest.mark.parametrize(
    ("data", "options", "words"),
    [
        ("nope.h5", {}, "no such file: nope.h5"),
        (torch.zeros(3, 1), {}, "does not accept Tensor; pass a file path, a Dataset"),
        ((torch.zeros(3, 1), torch.zeros(4, 1)), {}, "src has 3 samples, but tgt has 4"),
        (_numbers(3), {"batch_size": 0}, "error: batch_size must be greater than 0 (got 0)"),
        (_numbers(3), {"start_step": -1}, "start_step must be 0 or greater (got -1)"),
    ],
)
def test_invalid_data_is_one_line(
    data: object, options: dict[str, int], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with _ends_with(2) as world:
        world.loader(data, **options)
    assert words in capsys.readouterr().err


def test_an_evaluation_within_a_step_does_not_reset_the_step_of_the_heartbeat(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    places = []
    with ddp_hpc.distributed() as world:
        heartbeat = world.parts.heartbeat
        assert heartbeat is not None
        monkeypatch.setattr(heartbeat, "at", lambda step, phase: places.append((step, phase)))
        for batch in world.loader(_numbers(8), batch_size=2):
            if batch.step == 3:
                for _ in world.loader(_numbers(4), batch_size=2, shuffle=False):
                    pass
    assert places == [
        *((step, phase) for step in (1, 2, 3) for phase in ("data", "script")),
        *((3, phase) for phase in ("data", "script", "data", "script", "outside of a step")),
        *((4, phase) for phase in ("data", "script", "outside of a step")),
    ]


# `snapshots`.


def test_a_loop_that_was_left_resumes_with_the_next_batch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ddp_hpc.distributed() as world:
        assert _train(world.loader(_numbers(10), batch_size=4, epochs=2), "run", stop_after=2) == [1, 2]
        assert _train(world.loader(_numbers(10), batch_size=4, epochs=2), "run") == [3, 4, 5, 6]
        assert _train(world.loader(_numbers(10), batch_size=4, epochs=2), "run") == [], "all steps are done"
    said = "note: no step was left to do after step 6; for a new run, use another directory for the snapshots"
    assert capsys.readouterr().err.count(said) == 1
    assert read_state(tmp_path / "run") == RunState(State.DONE, 6, "training complete")


def test_a_signal_stops_the_loop_and_the_process_ends_with_75(tmp_path: Path) -> None:
    with _ends_with(75) as world:
        model, optimizer = _linear()
        with ddp_hpc.snapshots("run", model=model, optimizer=optimizer) as snapshots:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert snapshots.step(1)
            assert snapshots.step(2), "the request to stop remains"
        assert world.stopped == "rank 0 received SIGUSR1"
    assert read_state(tmp_path / "run") == RunState(State.REQUEUE, 2, "rank 0 received SIGUSR1")


def test_snapshots_are_saved_when_due_and_the_newest_are_kept(tmp_path: Path) -> None:
    with ddp_hpc.distributed():
        model, optimizer = _linear()
        with ddp_hpc.snapshots("run", model=model, optimizer=optimizer, every_steps=2, keep=2) as snapshots:
            assert snapshots.start == 0
            for step in range(1, 8):
                snapshots.step(step)
    found = sorted(path.name for path in (tmp_path / "run").glob("step_*"))
    assert found == ["step_00000006", "step_00000007"]


def test_the_default_directory_is_in_the_run_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DDP_HPC_RUN_DIR", str(tmp_path / "mine"))
    with ddp_hpc.distributed():
        model, optimizer = _linear()
        with ddp_hpc.snapshots(model=model, optimizer=optimizer) as snapshots:
            snapshots.step(1)
    assert [path.name for path in (tmp_path / "mine" / "snapshots").glob("step_*")] == ["step_00000001"]


def test_without_a_directory_nothing_is_saved(tmp_path: Path) -> None:
    with ddp_hpc.distributed() as world:
        assert len(_train(world.loader(_numbers(10), batch_size=4), None)) == 3
    assert list(tmp_path.iterdir()) == []


def _fail_in_a_loop() -> None:
    model, optimizer = _linear()
    with ddp_hpc.snapshots("run", model=model, optimizer=optimizer):
        raise ValueError("mine")


def test_an_error_in_the_loop_is_written_to_the_run_directory(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="mine"), ddp_hpc.distributed():
        _fail_in_a_loop()
    state = read_state(tmp_path / "run")
    assert state is not None
    assert (state.state, state.reason) == ("failed", "ValueError: mine")


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([1, 1], "snapshots.step(1): step 1 is already done; start counting at snapshots.start + 1"),
        ([0], "snapshots.step(0): step 0 is already done"),
    ],
)
def test_an_invalid_step_is_refused(steps: list[int], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with _ends_with(2):
        model, optimizer = _linear()
        with ddp_hpc.snapshots("run", model=model, optimizer=optimizer) as snapshots:
            for step in steps:
                snapshots.step(step)
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("folder", "options", "words"),
    [
        ("", {}, "the directory is empty"),
        ("run", {"keep": 0}, "error: keep must be greater than 0 (got 0)"),
        ("/dev/null/run", {}, "/dev/null/run"),
    ],
)
def test_an_invalid_snapshot_directory_or_option_is_one_line(
    folder: str, options: dict[str, int], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with _ends_with(2) as world:
        _train(world.loader(_numbers(10)), folder, **options)
    assert words in capsys.readouterr().err


# `tracing`.


def _traced(num_steps: int, **options: object) -> None:
    with ddp_hpc.distributed():
        model = ddp_hpc.wrap(nn.Linear(4, 4))
        with ddp_hpc.tracing("traces", **options) as trace:
            for _ in range(num_steps):
                with torch.profiler.record_function("my step"):
                    model(torch.ones(2, 4))
                trace.step()


def test_a_trace_contains_the_steps_of_its_window(tmp_path: Path) -> None:
    _traced(6, wait=1, warmup=1, active=2)
    names = sorted(path.name for path in (tmp_path / "traces").iterdir())
    assert names == ["rank00000-of-00001.json.gz", "rank00000-of-00001.txt"]
    events = json.loads(gzip.decompress((tmp_path / "traces" / names[0]).read_bytes()))["traceEvents"]
    assert len([e for e in events if e.get("name") == "my step" and e.get("ph") == "X"]) == 2
    assert "aten::addmm" in (tmp_path / "traces" / names[1]).read_text()


def test_a_loop_that_ends_before_the_window_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _traced(1)
    assert "no trace: the loop ended before step 3" in capsys.readouterr().err
    assert list((tmp_path / "traces").iterdir()) == []


@pytest.mark.check
def test_dataloader_workers_do_not_run_the_script_again(tmp_path: Path) -> None:
    with h5py.File("d.h5", "w") as file:
        file["src"], file["tgt"] = torch.rand(20, 3).numpy(), torch.rand(20, 1).numpy()
    script = tmp_path / "mine.py"
    script.write_text(  # like most scripts, without `if __name__ == "__main__"`
        """
import ddp_hpc

print("begun", flush=True)
with ddp_hpc.distributed() as world:
    for batch in world.loader("d.h5", batch_size=8, workers=1):
        world.say(f"step {batch.step}")
"""
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n") == ["begun", "step 1", "step 2", "step 3", ""]
