"""--idle-timeout of render and submit: for which programs it is accepted."""

from __future__ import annotations

import pytest

from ddp_hpc.base.errors import RequestError
from ddp_hpc.render.render_script import render
from ddp_hpc.request.job import Job
from ddp_hpc.sites.site import load_site
from tests.batch.conftest import Sandbox


def script(*command: str, profile: str = "generic_slurm", **options: object) -> str:
    return render(Job(idle_timeout_s=600, command=command, **options), load_site(profile))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("command", "options"),
    [
        (("python", "train.py"), {}),
        (("python", "train.py"), {"launcher": "torchrun"}),
        (("ddp-hpc", "exec", "--", "./run.sh"), {}),
    ],
)
def test_the_supervisor_gets_the_limit(command: tuple[str, ...], options: dict[str, object]) -> None:
    assert " --idle-timeout 600 " in script(*command, **options)


@pytest.mark.parametrize(
    ("command", "options", "what"),
    [
        (("python", "-m", "ddp_hpc.train"), {}, "use its option --hang-timeout"),
        (("./run.sh",), {}, "begin it with ddp-hpc exec --"),
        (("python", "train.py"), {"env_style": "none"}, "or omit --env-style"),
        (("python", "train.py"), {"profile": "local"}, "--idle-timeout"),
    ],
)
def test_a_program_that_nothing_watches_is_refused(
    command: tuple[str, ...], options: dict[str, object], what: str
) -> None:
    with pytest.raises(RequestError, match=what):
        script(*command, **options)


def test_a_supervisor_of_ddp_hpc_train_refuses_the_limit(sandbox: Sandbox) -> None:
    line = (
        "python -m ddp_hpc.job --scheduler slurm --script $0 --idle-timeout 5 -- srun python -m ddp_hpc.train"
    )
    done = sandbox.run(f"exec {line}\n", SLURM_JOB_ID="7", DDP_HPC_RUN_DIR=str(sandbox.work / "run"))
    assert done.returncode == 2, done.stderr
    assert b"--idle-timeout cannot be used with ddp_hpc.train; use its option --hang-timeout" in done.stderr
