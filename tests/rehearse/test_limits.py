"""The limits of a launch on one machine, and the parsing of command lines and times."""

from __future__ import annotations

import pytest

from ddp_hpc.rehearse.launchers import pals
from ddp_hpc.rehearse.launchers.fit_to_machine import Limits
from ddp_hpc.rehearse.launchers.options import RefusedError, read_line
from ddp_hpc.rehearse.slurm.controller import hostlist, run_lengths
from ddp_hpc.rehearse.slurm.option_tables import SRUN, walltime_s

LIMITS = Limits(
    ranks_per_node=2,
    num_nodes=2,
    requested_nodes=500,
    threads=1,
    trainer_arguments=("--max-steps", "3"),
    nodes=("node1", "node2"),
)


@pytest.mark.parametrize(
    ("num_ranks", "per_node", "here"),
    [(8, 4, [2, 2]), (2, 1, [1, 1]), (1, 4, [1]), (3, 2, [2, 1]), (2000, 4, [2, 2]), (10**8, 10**6, [2, 2])],
)
def test_ranks_are_limited_to_the_simulated_nodes(num_ranks: int, per_node: int, here: list[int]) -> None:
    assert LIMITS.counts(num_ranks, per_node) == here


def test_ranks_that_are_not_started_are_reported(capfd: pytest.CaptureFixture[str]) -> None:
    LIMITS.counts(4, 2)
    assert capfd.readouterr().err == ""
    LIMITS.counts(5, 4)
    assert "starting 3 of 5 ranks" in capfd.readouterr().err


def test_without_a_rehearsal_nothing_is_changed() -> None:
    assert Limits().counts(5, 2) == [2, 2, 1]
    assert Limits().command(["python", "-m", "ddp_hpc.train"]) == ["python", "-m", "ddp_hpc.train"]
    assert Limits().environment({"MASTER_ADDR": "node1"}) == {"MASTER_ADDR": "node1"}


def test_only_our_trainer_gets_steps_and_only_without_its_own_option() -> None:
    added = ["--max-steps", "3"]
    assert LIMITS.command(["python", "-m", "ddp_hpc.train"])[3:] == added
    assert LIMITS.command(["/x/torchrun_script.sh", "--lr", "1"])[3:] == added
    assert LIMITS.command(["python", "-m", "ddp_hpc.train", "--max-steps=9"])[3:] == ["--max-steps=9"]
    assert LIMITS.command(["python", "mine.py"]) == ["python", "mine.py"]


@pytest.mark.parametrize(
    ("command", "is_trainer"),
    [
        (["/x/torchrun_script.sh"], True),
        (["/x/torchrun_script.sh", "python", "-u", "-m", "ddp_hpc.train", "--lr", "1"], True),
        (["/x/torchrun_script.sh", "-m", "my.module"], False),
        (["/x/torchrun_script.sh", "python3.11", "train.py"], False),
        (["/x/torchrun_script.sh", "./train", "--model", "ddp_hpc.train"], False),
        (["/venv/bin/ddp-hpc", "train", "--lr", "1"], True),
        (["/venv/bin/ddp-hpc", "exec", "--", "python", "train.py"], False),
        (["python", "mine.py", "ddp_hpc.train"], False),
    ],
)
def test_a_program_is_the_trainer_only_if_it_runs_it(command: list[str], is_trainer: bool) -> None:
    assert (LIMITS.command(command)[-2:] == ["--max-steps", "3"]) is is_trainer


@pytest.mark.parametrize(
    ("word", "here"),
    [
        ("node1", "127.0.0.1"),
        ("node2.hsn.site.gov", "127.0.0.1"),
        ("--rdzv-endpoint=node1:29500", "--rdzv-endpoint=127.0.0.1:29500"),
        ("tcp://node2.hsn:80", "tcp://127.0.0.1:80"),
        ("node10", "node10"),
        ("mynode1", "mynode1"),
        ("/data/node1/x", "/data/node1/x"),
    ],
)
def test_the_name_of_a_simulated_node_is_replaced_by_this_machine(word: str, here: str) -> None:
    assert LIMITS.command([word]) == [here]


def test_torchrun_agents_start_at_most_the_limited_number_of_ranks() -> None:
    found = LIMITS.environment({"DDP_HPC_RANKS_PER_NODE": "4", "SLURM_GPUS_ON_NODE": "1"})
    assert (found["DDP_HPC_RANKS_PER_NODE"], found["SLURM_GPUS_ON_NODE"]) == ("2", "1")


def test_ranks_have_no_gpu_and_no_fast_network() -> None:
    far = {"MASTER_ADDR": "node1", "NCCL_SOCKET_IFNAME": "hsn", "DDP_HPC_FABRIC_SUFFIX": ".hsn"}
    found = LIMITS.environment({**far, "CUDA_VISIBLE_DEVICES": "3"})
    assert (found["MASTER_ADDR"], found["CUDA_VISIBLE_DEVICES"]) == ("127.0.0.1", "")
    assert not {"NCCL_SOCKET_IFNAME", "DDP_HPC_FABRIC_SUFFIX"} & found.keys()


def test_options_of_srun_are_read_in_all_their_spellings() -> None:
    line = read_line(["-N2", "-n", "4", "--ntasks-per-no=2", "--cpus-per-task", "8", "-l", "a", "-n"], SRUN)
    expected = {"nodes": "2", "ntasks": "4", "ntasks-per-node": "2", "cpus-per-task": "8", "label": ""}
    assert line.values == expected
    assert line.command == ["a", "-n"]


def test_options_of_pals_take_one_dash_or_two() -> None:
    line = read_line(["-n", "4", "--ppn=2", "-env", "A=b c", "--env=D=e=f", "--", "-x"], pals.TABLE)
    assert line.all_of("env") == ["A=b c", "D=e=f"]
    assert (line.values["num_ranks"], line.values["ppn"], line.command) == ("4", "2", ["-x"])


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 5400), ("10:30", 630), ("1:00:00", 3600), ("1-12", 129600), ("1-00:30", 88200), ("unlimited", 0)],
)
def test_all_formats_of_a_slurm_time_are_read(text: str, seconds: int) -> None:
    assert walltime_s(text) == seconds


@pytest.mark.parametrize("text", ["", "1:2:3:4", "-1", "1h", "9" * 40])
def test_invalid_times_are_refused(text: str) -> None:
    with pytest.raises(RefusedError, match="Invalid --time specification"):
        walltime_s(text)


def test_lists_have_slurms_short_notation() -> None:
    assert hostlist(["node1"]) == "node1"
    assert hostlist(["node1", "node2", "node3"]) == "node[1-3]"
    assert run_lengths([2, 2, 1]) == "2(x2),1"
