"""The five ways to install ddp-hpc: wheel, sdist to wheel, checkout, PYTHONPATH, and editable install."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[1]


def _run(*argv: str, cwd: Path, env: dict[str, str] | None = None) -> str:
    base = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        argv, cwd=cwd, env=base | (env or {}), capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, f"{argv}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A directory with an sdist, and with a wheel that was built from the sdist and not from the checkout."""
    folder = tmp_path_factory.mktemp("dist")
    # No build isolation: the build needs only hatchling, which the tests' environment has.
    argv = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(PROJECT)]
    _run(*argv, cwd=folder)
    return folder


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory) -> Path:
    """The bin directory of an environment with the wheel and this environment's packages, but no checkout."""
    folder = tmp_path_factory.mktemp("installed")
    _run(sys.executable, "-m", "venv", "--without-pip", str(folder), cwd=folder)
    python = folder / "bin" / "python"
    (wheel,) = built.glob("*.whl")
    _run(
        *(sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps"),
        *("--no-index", "--disable-pip-version-check", str(wheel)),
        cwd=folder,
    )
    libraries = _run(
        sys.executable, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])", cwd=folder
    )
    own = _run(str(python), "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])", cwd=folder)
    # Python does not read .pth files in this directory, so the editable install is not found through it.
    (Path(own.strip()) / "libraries.pth").write_text(libraries)
    return folder / "bin"


@pytest.mark.check
def test_the_wheel_contains_only_the_code_and_the_assets(built):
    (wheel,) = built.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {"ddp_hpc", "data_gen"} < tops
    assert {top for top in tops if not top.startswith("ddp_hpc-")} == {"ddp_hpc", "data_gen"}
    for asset in ("templates/pbs.sh.j2", "profiles/polaris.toml", "jobs/polaris_ddp.pbs"):
        assert f"ddp_hpc/_assets/{asset}" in names
    assert "ddp_hpc/py.typed" in names
    assert any(name.endswith("scripts/torchrun_script.sh") for name in names)
    metadata = zipfile.ZipFile(wheel).read(next(n for n in names if n.endswith("METADATA"))).decode()
    required = [
        line for line in metadata.splitlines() if line.startswith("Requires-Dist") and "extra" not in line
    ]
    assert sorted(line.split()[1].split(">")[0] for line in required) == ["click", "jinja2"]


@pytest.mark.check
def test_an_installed_wheel_renders_in_any_directory(installed, tmp_path):
    script = _run(str(installed / "ddp-hpc"), "render", "--profile", "polaris", "--nodes", "2", cwd=tmp_path)
    assert "#PBS -l select=2:system=polaris" in script
    where = _run(str(installed / "python"), "-c", "import ddp_hpc; print(ddp_hpc.__file__)", cwd=tmp_path)
    assert str(PROJECT) not in where


@pytest.mark.check
def test_an_installed_wheel_has_torchrun_script_on_the_path(installed):
    script = installed / "torchrun_script.sh"
    assert os.access(script, os.X_OK)
    assert script.read_bytes() == (PROJECT / "jobs" / "torchrun_script.sh").read_bytes()


@pytest.mark.check
def test_an_installed_wheel_trains_under_mpiexec(installed, tmp_path):
    mpiexec = Path(sys.executable).parent / "mpiexec"
    options = ["--model", "linear", "--num-samples", "32", "--epochs", "1"]
    # Only ddp-hpc is installed there: the MPI library is that of this environment.
    env = {"MPI4PY_LIBMPI": str(next((mpiexec.parents[1] / "lib").glob("libmpi.so.12")))}
    argv = [str(mpiexec), "-n", "2", str(installed / "python"), "-m", "ddp_hpc.train", *options]
    out = _run(*argv, cwd=tmp_path, env=env)
    assert "2 ranks on 1 node (hydra)" in out
    assert "done: " in out


def test_the_editable_install_that_make_test_uses_has_the_scripts(tmp_path):
    folder = Path(sys.executable).parent
    assert os.access(folder / "torchrun_script.sh", os.X_OK)
    assert "render" in _run(str(folder / "ddp-hpc"), "--help", cwd=tmp_path)


def test_a_bare_checkout_works_with_python_m(tmp_path):
    copy = tmp_path / "checkout"
    copy.mkdir()
    for name in ("ddp_hpc", "data_gen", "templates", "profiles", "jobs", "pyproject.toml"):
        (copy / name).symlink_to(PROJECT / name)
    # -S hides this environment's editable install; PYTHONPATH makes click and jinja2 available again.
    libraries = _run(
        sys.executable,
        "-c",
        "import click, pathlib; print(pathlib.Path(click.__file__).parents[1])",
        cwd=tmp_path,
    ).strip()
    argv = [sys.executable, "-S", "-m", "ddp_hpc", "render", "--profile", "polaris", "--nodes", "2"]
    assert "#PBS" in _run(*argv, cwd=copy, env={"PYTHONPATH": libraries})
