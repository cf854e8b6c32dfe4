"""Profiles set the striping of data files on Lustre, and scripts pass it on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ddp_hpc.base.errors import RequestError
from ddp_hpc.base.toml_config import read_toml
from ddp_hpc.render.render_script import render
from ddp_hpc.request.job import Job
from ddp_hpc.sites.profile_tables import Lustre
from ddp_hpc.sites.site import Site, load_site
from tests.batch.conftest import Sandbox

PROFILE = """title = "t"
scheduler = "local"
owner = "o"
checked = "2026-11-21"
launch = { default = "mpiexec" }
"""


@pytest.mark.parametrize(
    ("lustre", "hint"),
    [
        (Lustre(stripe_count=8, stripe_size="4M"), "8,4M"),
        (Lustre(stripe_count=8), "8"),
        (Lustre(stripe_count=-1, stripe_size="16M"), "-1,16M"),
        (Lustre(), None),
    ],
)
def test_the_ranks_read_the_sites_values(sandbox: Sandbox, lustre: Lustre, hint: str | None) -> None:
    mpiexec = sandbox.launcher("mpiexec")
    script = render(Job(), replace(load_site("local"), lustre=lustre))
    assert sandbox.run(script, DDP_HPC_MPIEXEC=str(mpiexec)).returncode == 0
    assert sandbox.seen().get("DDP_HPC_LUSTRE_STRIPE") == hint


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("stripe_count = -2", "stripe_count must be -1, 0, or 1 to 2000 (got -2)"),
        ("stripe_count = 2001", "stripe_count must be -1, 0, or 1 to 2000 (got 2001)"),
        ('stripe_count = 8\nstripe_size = "4"', "(got '4' with 8)"),
        ('stripe_count = 8\nstripe_size = "4M; rm"', "(got '4M; rm' with 8)"),
        ('stripe_count = 8\nstripe_size = "0M"', "(got '0M' with 8)"),
        ('stripe_size = "4M"', "(got '4M' with 0)"),
        ("stripes = 8", 'unknown key "stripes"'),
    ],
)
def test_values_that_lustre_would_refuse_are_refused_with_their_line(
    table: str, said: str, tmp_path: Path
) -> None:
    profile = tmp_path / "p.toml"
    profile.write_text(f"{PROFILE}[lustre]\n{table}\n", encoding="utf-8")
    with pytest.raises(RequestError) as caught:
        read_toml(profile, Site)
    assert str(caught.value).startswith(f"{profile}:")
    assert said in str(caught.value)
