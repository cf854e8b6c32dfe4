"""Checks that depend on the version of the site's scheduler."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from ddp_hpc.base.errors import RequestError
from ddp_hpc.lint.run_checks import lint_script
from ddp_hpc.sites.profile_tables import Pbs, Slurm
from ddp_hpc.sites.site import Site, load_site
from tests.batch.conftest import run_cli

SLURM = "#!/bin/bash\n#SBATCH --time=01:00:00\n"
CPUS = SLURM + "#SBATCH --cpus-per-task=8\nsrun python train.py\n"
LOG = SLURM + "#SBATCH --output=logs/%j.out\nmkdir -p logs\n"
STEP = SLURM + "#SBATCH --gpus-per-node=4\nsrun --gres=gpu:1 ./a.out\n"
MAIL = SLURM + "#SBATCH --mail-type=BEGIN\n#SBATCH --mail-type=END\n"


def site_with(version: str) -> Site:
    site = load_site("generic_slurm")
    return replace(site, slurm=replace(site.slurm, version=version))


@pytest.mark.parametrize(
    ("check", "version", "expected", "text"),
    [
        ("SLURM007", "22.05", True, CPUS),
        ("SLURM007", "23.02.7", True, CPUS),
        ("SLURM007", "23.11", False, CPUS),
        ("SLURM007", "22.05", False, CPUS.replace("srun", "srun -c 8")),
        ("JOB007", "24.11", False, MAIL),
        ("JOB007", "25.05", True, MAIL),
        ("SLURM015", "22.05.8", True, SLURM + "#SBATCH --gres=gpu=4\n"),
        ("SLURM015", "23.11", False, SLURM + "#SBATCH --gres=gpu=4\n"),
        ("SLURM020", "22.05", True, LOG),
        ("SLURM024", "25.11", False, STEP),
        ("SLURM024", "26.05", True, STEP),
        ("SLURM022", "22.05", True, SLURM + "#SBATCH --segment=2\n"),
        ("SLURM022", "24.05", False, SLURM + "#SBATCH --segment=2\n"),
        ("SLURM022", "18.08", False, SLURM + "#SBATCH --workdir=/home/me\n"),
        ("SLURM022", "19.05", True, SLURM + "#SBATCH --workdir=/home/me\n"),
    ],
)
def test_a_check_uses_the_version_of_the_site(check: str, version: str, expected: bool, text: str) -> None:
    assert (check in {found.check for found in lint_script(text, site_with(version))}) == expected


def test_without_a_version_a_missing_log_directory_is_a_note() -> None:
    assert [one.severity for one in lint_script(LOG) if one.check == "SLURM020"] == ["note"]


@pytest.mark.parametrize(
    ("profile", "answer", "expected"),
    [
        ("generic_slurm", "slurm 26.05.3", True),
        ("generic_slurm", "slurm-wlm 22.05.8", False),
        ("generic_slurm", "sbatch: fatal: Could not establish a configuration source", False),
        ("frontier", "slurm 26.05.3", False),  # the profile contains another version
        ("perlmutter", "slurm 26.05.3", False),  # this machine is not the site of the profile
    ],
)
def test_the_version_is_that_of_the_installed_sbatch(
    profile: str, answer: str, expected: bool, tmp_path: Path
) -> None:
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text(f"#!/bin/sh\n[ \"$1\" = --version ] && echo '{answer}'\n")
    sbatch.chmod(0o755)
    (tmp_path / "job.sh").write_text(SLURM + "#SBATCH --gres=gpu:4\n#SBATCH --gpus-per-node=4\n")
    path = f"{sbatch.parent}:{os.environ['PATH']}"
    done = run_cli("lint", "--profile", profile, "job.sh", cwd=tmp_path, PATH=path)
    assert (b"error SLURM016" in done.stdout) == expected


@pytest.mark.parametrize("version", ["22", "new", "22.05-1", "22.05\n", "v22.05"])
def test_a_profile_with_an_invalid_version_is_refused(version: str) -> None:
    with pytest.raises(RequestError, match="version must be a number"):
        Slurm(version=version)
    with pytest.raises(RequestError, match="version must be a number"):
        Pbs(version=version)


def test_a_large_request_for_a_queue_that_is_not_in_the_profile_is_no_error() -> None:
    site = load_site("alps_clariden")
    text = SLURM + "#SBATCH --ntasks-per-node=4\n#SBATCH --cpus-per-task=100\n#SBATCH --partition="
    assert "SITE008" in {found.check for found in lint_script(f"{text}normal\n", site)}
    assert "SITE008" not in {found.check for found in lint_script(f"{text}large-nodes\n", site)}
