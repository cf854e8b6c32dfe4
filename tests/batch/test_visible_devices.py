"""LOCAL_RANK names a device that the rank sees, for every profile and launcher, on one node and on two.

tests/slurm/test_visible_devices.py compares the rules of `num_devices_seen` with a real srun.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_hpc.base.errors import RequestError
from ddp_hpc.render.render_script import render
from ddp_hpc.request.job import Job
from ddp_hpc.request.queue_choice import largest_num_nodes
from ddp_hpc.request.rank_layout import lay_out
from ddp_hpc.schedulers.registry import scheduler_of_site
from ddp_hpc.sites.site import load_site
from tests.batch.devices_seen import num_devices_seen

NAMES = [path.stem for path in sorted((Path(__file__).parents[2] / "profiles").glob("*.toml"))]


@pytest.mark.parametrize("num_nodes", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_each_rank_sees_the_device_of_its_local_rank(name: str, num_nodes: int) -> None:
    site = load_site(name)
    for launcher in scheduler_of_site(site).writer.launchers:
        account = f"{site.account.prefix}a{site.account.suffix}" if site.account.required else ""
        job = Job(num_nodes=num_nodes, launcher=launcher, account=account)
        try:
            script, layout = render(job, site), lay_out(job, site)
        except RequestError:  # the site has one node for a job, or does not support the launcher
            assert launcher != site.launch.default or num_nodes > (largest_num_nodes(site) or 1)
            continue
        if layout.devices:
            assert layout.ranks_per_node <= num_devices_seen(script, layout.devices), launcher


def test_a_script_that_binds_each_rank_to_one_gpu_would_fail() -> None:
    site = load_site("perlmutter")
    script = render(Job(), site)
    assert num_devices_seen(script, 4) == 4
    assert num_devices_seen(script.replace("--gpu-bind=none", "--gpu-bind=closest"), 4) == 1
    assert num_devices_seen(script.replace("--gpu-bind=none", "--gpus-per-task=1"), 4) == 1
    assert num_devices_seen(script.replace("DEVICES=3,2,1,0", "DEVICES=3"), 4) == 1
