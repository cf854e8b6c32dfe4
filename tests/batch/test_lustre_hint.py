"""How a profile says what a data file on Lustre is to look like, and the script hands it on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ddp_hpc.batch.job import Job
from ddp_hpc.batch.render import render
from ddp_hpc.batch.site import Site, load_site
from ddp_hpc.batch.site_tables import Lustre
from ddp_hpc.errors import RequestError
from ddp_hpc.toml_config import parse_toml
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
    sandbox.launcher("mpiexec")
    script = render(Job(), replace(load_site("local"), lustre=lustre))
    assert sandbox.run(script).returncode == 0
    assert sandbox.seen().get("DDP_HPC_LUSTRE_STRIPE") == hint


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("stripe_count = -2", "stripe_count is -2; -1, 0, or 1 to 2000 is needed"),
        ("stripe_count = 2001", "stripe_count is 2001; -1, 0, or 1 to 2000 is needed"),
        ('stripe_count = 8\nstripe_size = "4"', "stripe_size is '4' with a stripe_count of 8; megabytes"),
        ('stripe_count = 8\nstripe_size = "4M; rm"', "stripe_size is '4M; rm'"),
        ('stripe_count = 8\nstripe_size = "0M"', "stripe_size is '0M'"),
        ('stripe_size = "4M"', "stripe_size is '4M' with a stripe_count of 0"),
        ("stripes = 8", 'unknown key "stripes"'),
    ],
)
def test_values_that_lustre_would_refuse_are_refused_with_their_line(table: str, said: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_toml(f"{PROFILE}[lustre]\n{table}\n", Site, source="p.toml")
    assert str(caught.value).startswith("p.toml:")
    assert said in str(caught.value)
