"""Checks that depend on the version of the site's scheduler."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ddp_hpc.errors import RequestError
from ddp_hpc.lint.run_checks import lint_script
from ddp_hpc.sites.profile_tables import Pbs, Slurm
from ddp_hpc.sites.site import Site, load_site

SLURM = "#!/bin/bash\n#SBATCH --time=01:00:00\n"
CPUS = SLURM + "#SBATCH --cpus-per-task=8\nsrun python train.py\n"
MAIL = SLURM + "#SBATCH --mail-type=BEGIN\n#SBATCH --mail-type=END\n"


def site_with(version: str) -> Site:
    site = load_site("generic_slurm")
    return replace(site, slurm=replace(site.slurm, version=version))


@pytest.mark.parametrize(
    ("check", "version", "expected", "text"),
    [
        ("SLURM007", "22.05", True, CPUS),
        ("SLURM007", "23.02.7", True, CPUS),
        ("SLURM007", "21.08", False, CPUS),
        ("SLURM007", "23.11", False, CPUS),
        ("SLURM007", "", False, CPUS),
        ("SLURM007", "22.05", False, CPUS.replace("srun", "srun -c 8")),
        ("JOB007", "24.11", False, MAIL),
        ("JOB007", "25.05", True, MAIL),
        ("SLURM015", "22.05.8", True, SLURM + "#SBATCH --gres=gpu=4\n"),
        ("SLURM015", "23.11", False, SLURM + "#SBATCH --gres=gpu=4\n"),
        ("SLURM023", "23.11", False, SLURM + "#SBATCH --gres=gpu=4\n"),
        ("SLURM015", "23.02", True, SLURM + "#SBATCH --nodes=2,4\n"),
        ("SLURM022", "22.05", True, SLURM + "#SBATCH --segment=2\n"),
        ("SLURM022", "24.05", False, SLURM + "#SBATCH --segment=2\n"),
        ("SLURM022", "25.05", True, SLURM + "#SBATCH --power=level\n"),
        ("SLURM022", "23.11", False, SLURM + "#SBATCH --power=level\n"),
        ("SLURM022", "18.08", False, SLURM + "#SBATCH --workdir=/home/me\n"),
        ("SLURM022", "19.05", True, SLURM + "#SBATCH --workdir=/home/me\n"),
    ],
)
def test_a_check_uses_the_version_of_the_site(check: str, version: str, expected: bool, text: str) -> None:
    assert (check in {found.check for found in lint_script(text, site_with(version))}) == expected


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
