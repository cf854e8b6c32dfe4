"""--container: the program of each rank runs in the container of the profile's runtime."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_hpc.errors import RequestError
from ddp_hpc.render.render_script import render
from ddp_hpc.request.job import Job
from ddp_hpc.sites.site import Site, load_site
from tests.batch.conftest import Sandbox

APPTAINER = '["apptainer", "exec", "--nv", "{image}"]'


def site(folder: Path, container: str = APPTAINER) -> Site:
    path = folder / "own.toml"
    path.write_text(f'extends = "generic_slurm"\n[launch]\ncontainer = {container}\n')
    return load_site(str(path))


def test_the_launcher_starts_the_program_in_the_container_and_the_supervisor_is_outside(
    tmp_path: Path,
) -> None:
    text = render(Job(container="a b.sif", command=("python", "train.py")), site(tmp_path))
    assert "\n  ddp-hpc exec -- apptainer exec --nv 'a b.sif' python train.py \"$@\"\n" in text
    assert "exec python -m ddp_hpc.job" in text


def test_torchruns_agents_run_in_the_container(tmp_path: Path) -> None:
    text = render(Job(container="a.sif", launcher="torchrun"), site(tmp_path))
    assert "\n  apptainer exec --nv a.sif torchrun_script.sh python -m ddp_hpc.train " in text


def test_another_image_replaces_that_of_the_profile() -> None:
    text = render(Job(container="mine.sif"), load_site("lumi_g"))
    assert " singularity run mine.sif python " in text
    assert "multitorch" not in text.partition("exec python -m ddp_hpc.job")[2]


def test_the_image_can_be_the_value_of_an_option(tmp_path: Path) -> None:
    text = render(Job(container="docker:a/b:1"), site(tmp_path, '["shifter", "--image={image}"]'))
    assert " shifter --image=docker:a/b:1 python -m " in text


@pytest.mark.parametrize("profile", ["generic_slurm", "generic_pbs", "local"])
def test_a_profile_without_a_container_command_refuses_the_option(profile: str) -> None:
    with pytest.raises(RequestError, match="does not define how to start containers"):
        render(Job(container="a.sif"), load_site(profile))


@pytest.mark.parametrize("image", ["--bind=/:/x", "a\nb", "a\0", "\udcff"])
def test_a_hostile_image_is_refused(image: str) -> None:
    with pytest.raises(RequestError, match="is not the name of an image"):
        Job(container=image)


def test_a_container_command_needs_the_image_once(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="placeholder"):
        site(tmp_path, '["apptainer", "exec"]')


def test_an_image_with_shell_characters_is_one_word(tmp_path: Path, sandbox: Sandbox) -> None:
    image = "a$(touch canary)'b"
    text = render(Job(container=image, command=("./run",)), site(tmp_path))
    line = text[text.index("exec python -m ddp_hpc.job") :].removeprefix("exec ")
    prelude = "num_nodes=1; num_ranks=1; python() { printf '%s\\n' \"$@\"; }\n"
    done = sandbox.run(prelude + line)
    assert f"\n{image}\n./run\n" in done.stdout.decode()
    assert not (sandbox.work / "canary").exists()
