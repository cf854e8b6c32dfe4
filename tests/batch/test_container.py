"""--container: the program of each rank runs in the container of the profile's runtime."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from ddp_hpc.base.errors import RequestError
from ddp_hpc.lint.run_checks import lint_script
from ddp_hpc.render.render_script import render
from ddp_hpc.request.job import Job
from ddp_hpc.sites.site import Site, load_site, profile_files
from tests.batch.conftest import Sandbox
from tests.batch.test_written_scripts import SHELLCHECK

APPTAINER = '["apptainer", "exec", "--nv", "{image}"]'
# NVIDIA/pyxis@10751999, README.md: the image, mounts and the working directory.
PYXIS = (
    '["--container-image={image}", "--container-mounts={directory}:{directory}", '
    '"--container-workdir={directory}"]'
)


def site(folder: Path, container: str = APPTAINER) -> Site:
    path = folder / "own.toml"
    path.write_text(f'extends = "generic_slurm"\n[container]\ncommand = {container}\n')
    return load_site(str(path))


def test_the_launcher_starts_the_program_in_the_container_and_the_supervisor_is_outside(
    tmp_path: Path,
) -> None:
    text = render(Job(container="a b.sif", command=("python", "train.py")), site(tmp_path))
    assert "\n  ddp-hpc exec -- apptainer exec --nv 'a b.sif' python train.py \"$@\"\n" in text
    assert "exec python -m ddp_hpc.job" in text


def test_torchruns_agents_run_in_the_container(tmp_path: Path) -> None:
    text = render(Job(container="a.sif", launcher="torchrun"), site(tmp_path))
    assert "\n  apptainer exec --nv a.sif python -m ddp_hpc.torchrun.step python -m ddp_hpc.train " in text
    assert "\n# ddp-hpc must be installed in the container, too.\n" in text


def test_another_image_replaces_that_of_the_profile() -> None:
    text = render(Job(container="mine.sif"), load_site("lumi_g"))
    assert " singularity run mine.sif python " in text
    assert "multitorch" not in text.partition("exec python -m ddp_hpc.job")[2]


@pytest.mark.parametrize("profile", ["generic_slurm", "generic_pbs", "local"])
def test_a_profile_without_a_container_command_refuses_the_option(profile: str) -> None:
    with pytest.raises(RequestError, match="does not define how to start containers"):
        render(Job(container="a.sif"), load_site(profile))


@pytest.mark.parametrize("image", ["--bind=/:/x", "a\nb", "a\0", "\udcff"])
def test_a_hostile_image_is_refused(image: str) -> None:
    with pytest.raises(RequestError, match="is not the name or the path of an image"):
        Job(container=image)


def test_options_of_srun_start_the_container_of_all_that_it_runs(tmp_path: Path) -> None:
    text = render(
        Job(container="nvcr.io#nvidia/pytorch", command=("python", "train.py")), site(tmp_path, PYXIS)
    )
    assert (
        " '--container-image=nvcr.io#nvidia/pytorch'"
        ' --container-mounts="$PWD":"$PWD" '
        '--container-workdir="$PWD" \\\n  python -m ddp_hpc.exec python train.py "$@"\n'
    ) in text
    assert "\n# ddp-hpc must be installed in the container, too.\n" in text


def test_another_launcher_than_srun_cannot_start_a_container_with_options_of_srun(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="--launcher srun"):
        render(Job(container="a", launcher="mpiexec"), site(tmp_path, PYXIS))


def test_a_container_has_its_own_modules_and_not_all_variables_of_the_site(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text(
        f'extends = "generic_slurm"\n[container]\ncommand = {APPTAINER}\n'
        'software = ["module load apptainer"]\nwithout = ["NCCL_NET"]\n'
        '[env.multi_node]\nNCCL_NET = "AWS Libfabric"\nNCCL_CROSS_NIC = "1"\n'
    )
    own = load_site(str(path))
    inside, outside = (render(Job(container=image, num_nodes=2), own) for image in ("a.sif", ""))
    assert [word in inside for word in ("module load apptainer", "NCCL_NET=", "NCCL_CROSS_NIC=")] == [
        True,
        False,
        True,
    ]
    assert [word in outside for word in ("module load apptainer", "NCCL_NET=")] == [False, True]


WITH_CONTAINERS = [name for name in profile_files() if load_site(name).container.command]


@pytest.mark.parametrize("name", WITH_CONTAINERS)
def test_lint_and_shellcheck_find_nothing_more_in_a_script_with_a_container(
    name: str, tmp_path: Path
) -> None:
    own = load_site(name)
    scripts = [
        render(Job(container=image, account="a", num_nodes=2, command=("python", "train.py")), own)
        for image in ("img.sif", "")
    ]
    inside, outside = ([(one.check, one.severity) for one in lint_script(text, own)] for text in scripts)
    assert inside == outside
    assert SHELLCHECK
    (tmp_path / "job.sh").write_text(scripts[0])
    found = subprocess.run([SHELLCHECK, tmp_path / "job.sh"], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout


def test_most_profiles_define_how_to_start_containers() -> None:
    assert len(WITH_CONTAINERS) >= 35


def test_an_image_with_shell_characters_is_one_word(tmp_path: Path, sandbox: Sandbox) -> None:
    image = "a$(touch canary)'b"
    text = render(Job(container=image, command=("./run",)), site(tmp_path))
    line = text[text.index("exec python -m ddp_hpc.job") :].removeprefix("exec ")
    prelude = "num_nodes=1; num_ranks=1; python() { printf '%s\\n' \"$@\"; }\n"
    done = sandbox.run(prelude + line)
    assert f"\n{image}\n./run\n" in done.stdout.decode()
    assert not (sandbox.work / "canary").exists()
