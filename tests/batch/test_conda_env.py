"""--conda-env: the job activates a conda environment.

The stand-in for conda prints a shell function as `conda shell.bash hook` does. The rendered lines were also
run with conda 26.7 itself, which cannot be installed with pip.
"""

from __future__ import annotations

import pytest

from ddp_hpc.base.errors import RequestError
from ddp_hpc.render.render_script import render
from ddp_hpc.request.job import Job
from ddp_hpc.sites.site import load_site
from tests.batch.conftest import Sandbox

CONDA = r"""#!/bin/bash
[[ $* == "shell.bash hook" ]] || exit 2
cat <<'END'
conda() {
  if [[ ! -d $ENVS/$2 ]]; then
    echo "EnvironmentNameNotFound: Could not find conda environment: $2" >&2
    return 1
  fi
  export CONDA_DEFAULT_ENV=$2 PATH="$ENVS/$2/bin:$PATH"
}
END
"""
SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "n1"}


def script(name: str, profile: str = "generic_slurm") -> str:
    return render(Job(conda_env=name), load_site(profile))


def environ(sandbox: Sandbox) -> dict[str, str]:
    return {**SLURM, "SLURM_SUBMIT_DIR": str(sandbox.work), "ENVS": str(sandbox.folder / "envs")}


def test_the_environment_is_activated_and_comes_before_the_virtual_environment(sandbox: Sandbox) -> None:
    sandbox.program("conda", CONDA)
    sandbox.program("activate", "echo .venv was activated; exit 9\n", sandbox.work / ".venv" / "bin")
    envs = sandbox.folder / "envs" / "my env" / "bin"
    envs.mkdir(parents=True)
    sandbox.launcher("srun")
    done = sandbox.run(script("my env"), **environ(sandbox))
    assert done.returncode == 0, done.stdout + done.stderr
    assert sandbox.seen()["CONDA_DEFAULT_ENV"] == "my env"
    assert sandbox.seen()["PATH"].startswith(f"{envs}:")


def test_an_unknown_environment_ends_the_job_before_the_launch(sandbox: Sandbox) -> None:
    sandbox.program("conda", CONDA)
    sandbox.launcher("srun")
    done = sandbox.run(script("missing"), **environ(sandbox))
    assert (done.returncode, sandbox.record.exists()) == (1, False)
    assert b"Could not find conda environment: missing" in done.stderr


def test_without_conda_the_job_ends_with_one_line(sandbox: Sandbox) -> None:
    sandbox.launcher("srun")
    done = sandbox.run(script("mine"), **environ(sandbox))
    assert (done.returncode, sandbox.record.exists()) == (1, False)
    [line] = done.stderr.decode().splitlines()
    assert line == "error: conda was not found; load its module, such as --setup 'module load conda'"


def test_the_environment_follows_the_software_of_the_site_and_the_setup_lines() -> None:
    text = render(Job(conda_env="/proj/a/env", account="P", setup=("module load x",)), load_site("polaris"))
    order = ["conda activate base", "module load x", "conda activate /proj/a/env", "source "]
    positions = [text.index(f"\n{words}") if words != "source " else text.index(words) for words in order]
    assert positions == sorted(positions)


@pytest.mark.parametrize("name", ["-n", "a\nb"])
def test_a_value_that_is_not_a_name_is_refused(name: str) -> None:
    with pytest.raises(RequestError, match="is not the name or the path of an environment"):
        Job(conda_env=name)
