"""`ddp-hpc render --standalone`: scripts that need no ddp-hpc in the job."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ddp_hpc.base.errors import RequestError
from ddp_hpc.discovery.local_mpi import bundled_mpiexec
from tests.batch.conftest import Sandbox
from tests.batch.test_scripts_run import pbs, script, slurm

# Plain DDP, without ddp-hpc.
PROGRAM = """
import os, sys, torch, torch.distributed as dist
assert not any(name.startswith("ddp_hpc") for name in sys.modules)
dist.init_process_group("gloo")
value = torch.ones(1)
dist.all_reduce(value)
rank = f"rank {dist.get_rank()} of {dist.get_world_size()}"
os.write(1, f"{rank}, local {os.environ['LOCAL_RANK']}, sum {value.item():g}\\n".encode())
dist.destroy_process_group()
"""


def test_ranks_of_a_real_mpiexec_form_a_process_group(sandbox: Sandbox) -> None:
    (sandbox.work / "train.py").write_text(PROGRAM)
    mpiexec = bundled_mpiexec()
    assert mpiexec is not None
    sandbox.program("mpiexec", f'#!/bin/bash\nexec {mpiexec} "$@"\n')
    text = script("local", ranks_per_node=2, standalone=True, command=("python", "train.py"))
    done = sandbox.run(text, PYTHONPATH="", MASTER_ADDR="")
    assert done.returncode == 0, done.stderr
    ranks = ["rank 0 of 2, local 0, sum 2", "rank 1 of 2, local 1, sum 2"]
    assert sorted(done.stdout.decode().splitlines()) == ranks


def test_under_slurm_the_ranks_get_torchs_variables(sandbox: Sandbox) -> None:
    inner = 'while [[ $1 == -* ]]; do shift; done\nSLURM_PROCID=5 SLURM_LOCALID=1 exec "$@"'
    sandbox.launcher("srun", then=inner)
    sandbox.program("scontrol", "#!/bin/bash\necho n1\necho n2\n")
    sandbox.program(
        "show", '#!/bin/bash\necho "$RANK $LOCAL_RANK $WORLD_SIZE $MASTER_ADDR $MASTER_PORT $*"\n'
    )
    text = script("generic_slurm", num_nodes=2, ranks_per_node=4, standalone=True, command=("show", "a b"))
    done = sandbox.run(text, **slurm(sandbox, 2, SLURM_JOB_ID="123457", SLURM_JOB_NODELIST="n[1-2]"))
    assert done.stdout.decode() == "5 1 8 n1 23457 a b\n", done.stderr


def test_under_pbs_the_address_is_that_of_the_high_speed_network(sandbox: Sandbox) -> None:
    inner = 'while [[ $1 == -* ]]; do shift 2; done\nPALS_RANKID=3 PALS_LOCAL_RANKID=3 exec "$@"'
    sandbox.launcher("mpiexec", version="PALS", then=inner)
    sandbox.program("show", '#!/bin/bash\necho "$RANK $LOCAL_RANK $WORLD_SIZE $MASTER_ADDR"\n')
    text = script("polaris", num_nodes=2, standalone=True, command=("show",))
    done = sandbox.run(
        text, **pbs(sandbox, "x1.hsn.cm.polaris.alcf.anl.gov", "x2.hsn.cm.polaris.alcf.anl.gov")
    )
    assert done.stdout.decode() == "3 3 8 x1.hsn.cm.polaris.alcf.anl.gov\n", done.stderr


def test_the_script_does_not_call_ddp_hpc(tmp_path: Path) -> None:
    for launcher in ("srun", "torchrun"):
        text = script("generic_slurm", launcher=launcher, standalone=True, command=("python", "train.py"))
        code = [line for line in text.splitlines() if not line.startswith("#")]
        assert not [line for line in code if "ddp" in line.lower()]
        path = tmp_path / f"{launcher}.sh"
        path.write_text(text)
        shellcheck = str(Path(sys.executable).parent / "shellcheck")
        subprocess.run([shellcheck, "--exclude=SC2016", path], check=True)


@pytest.mark.parametrize(
    ("profile", "options", "said"),
    [
        ("abci3", {}, "--standalone is not supported with Open MPI's mpiexec"),
        ("generic_slurm", {"requeue": "on-signal"}, "only the supervisor of ddp-hpc can requeue a job"),
        ("generic_slurm", {"rank_logs": True}, "--rank-logs and --idle-timeout, or --standalone"),
        ("generic_slurm", {"restarts": 2}, "omit --requeue, --progress, --restarts, --rank-logs and"),
    ],
)
def test_what_a_standalone_script_cannot_do_is_refused(
    profile: str, options: dict[str, object], said: str
) -> None:
    with pytest.raises(RequestError, match=said):
        script(profile, standalone=True, **options)
