"""The selection of a profile if none is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_hpc.sites.detect import choose_profile, match
from ddp_hpc.sites.profile_tables import Detect


def commands(folder: Path, *names: str) -> dict[str, str]:
    """An environment whose PATH contains only these commands."""
    for name in names:
        (folder / name).write_text("#!/bin/sh\n")
        (folder / name).chmod(0o755)
    return {"PATH": str(folder)}


def test_the_profile_option_has_the_highest_priority() -> None:
    assert choose_profile("a", "b", {"DDP_HPC_PROFILE": "c"}) == ("a", "named by --profile")


def test_the_job_file_has_priority_over_the_variable() -> None:
    assert choose_profile("", "b", {"DDP_HPC_PROFILE": "c"}) == ("b", "named by the job file")
    assert choose_profile("", "", {"DDP_HPC_PROFILE": "c"}) == ("c", "named by DDP_HPC_PROFILE")


def test_the_machine_is_detected_before_the_schedulers(tmp_path: Path) -> None:
    environ = {"NERSC_HOST": "perlmutter", **commands(tmp_path, "qsub")}
    assert choose_profile("", "", environ) == ("perlmutter", "NERSC_HOST is perlmutter")


@pytest.mark.parametrize(
    ("present", "name", "why"),
    [
        (["sbatch"], "generic_slurm", "sbatch is on the PATH"),
        (["qsub"], "generic_pbs", "qsub is on the PATH"),
        (["sbatch", "qsub"], "generic_slurm", "sbatch is on the PATH"),  # Slurm's Torque wrappers
        ([], "generic_slurm", "no profile fits this host, and neither sbatch nor qsub is on the PATH"),
    ],
)
def test_the_scheduler_on_the_path_is_used_last(
    tmp_path: Path, present: list[str], name: str, why: str
) -> None:
    assert choose_profile("", "", commands(tmp_path, *present)) == (name, why)


def test_a_host_name_is_matched_as_a_whole() -> None:
    facts = Detect(host_patterns=("polaris-login-*",))
    assert match(facts, "polaris-login-04", {}) == "this host is polaris-login-04"
    assert match(facts, "not-polaris-login-04", {}) == ""


def test_an_environment_fact_needs_the_variable_and_its_value() -> None:
    facts = Detect(environment={"SITE": "big-*"})
    assert match(facts, "host", {"SITE": "big-one"}) == "SITE is big-one"
    assert match(facts, "host", {"SITE": "small"}) == ""
    assert match(facts, "host", {}) == ""
