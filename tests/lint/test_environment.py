"""JOB035 and JOB022 report variables that nothing reads or sets, and no others."""

from __future__ import annotations

import pytest

from ddp_hpc.lint.run_checks import lint_script


def _found(body: str, directive: str = "--ntasks=4") -> list[str]:
    text = f"#!/bin/bash\n#SBATCH --time=01:00:00\n#SBATCH {directive}\n{body}\n"
    return [one.check for one in lint_script(text) if one.check in ("JOB022", "JOB035")]


@pytest.mark.parametrize(
    "assignment",
    [
        "CUDA_VISIBLE_DEIVCES=0",
        "LD_LIBRARY_PATY=/opt/lib",
        "PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb=128",
        "NCCL_IB_DISABLE=true",
        "GLOO_SOCKET_IFNAME=^lo",
        "NCCL_SOCKET_IFNAME=10.0.0.1",
        "CUDA_VISIBLE_DEVICES='0, 1'",
        "CUDA_VISIBLE_DEVICES=[0,1]",
        "OMP_NUM_THREADS=auto",
        "CUDA_VISIBLE_DEVICES=$SLURM_JOB_GPUS",
    ],
)
def test_a_variable_that_nothing_reads_is_reported(assignment: str) -> None:
    assert _found(f"export {assignment}\nsrun ./simulate") == ["JOB035"]


@pytest.mark.parametrize(
    "body",
    [
        "export KMP_STACKSIZE=512m _OMP_NUM_THREADS=1",
        "export CUDA_VISIBLE_DEVICE=0\n./simulate --gpu $CUDA_VISIBLE_DEVICE",
        "export OMP_NUM_THREADS=4,2 CUDA_VISIBLE_DEVICES=0,1 NCCL_SOCKET_IFNAME=^lo,docker NCCL_IB_DISABLE=0",
        "export PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:128 CUDA_VISIBLE_DEVICES=$SLURM_LOCALID",
        "export ROCR_VISIBLE_DEVICES=0,1 HIP_VISIBLE_DEVICES=0,1",
        "export PYTHON_PATH=$PATH LD_LIBRARYPATH=${LIBRARY_PATH}",
    ],
)
def test_a_variable_that_is_read_is_not_reported(body: str) -> None:
    assert _found(body) == []


@pytest.mark.parametrize(
    "body", ["./simulate ${nodes[0]}", "./simulate --threads $NSLOTS", "./simulate $((SLURM_NTASK * 2))"]
)
def test_a_variable_that_the_job_does_not_set_is_reported(body: str) -> None:
    assert _found(body) == ["JOB022"]


@pytest.mark.parametrize(
    "body",
    [
        "nodes=(a b)\n./simulate ${nodes[0]}",
        "read -d '' -r -a nodes < names\n./simulate ${nodes[0]}",
        "nodes[0]=a\n./simulate ${nodes[0]}",
        "for nodes in a b; do ./simulate ${nodes[0]}; done",
        "while read nodes; do ./simulate ${nodes[0]}; done < names",
        "source settings.sh\n./simulate ${nodes[0]}",
        "./simulate $((SLURM_NTASKS * 2)) ${NSLOTS:-1}",
    ],
)
def test_a_variable_that_the_script_or_the_job_sets_is_not_reported(body: str) -> None:
    assert _found(body) == []


def test_the_type_of_the_gpus_is_not_a_number() -> None:
    body = "srun torchrun --nproc-per-node=$SLURM_GPUS_PER_NODE train.py"
    assert _found(body, "--gpus-per-node=a100:4") == ["JOB022"]
    assert _found(body, "--gpus-per-node=4") == []
