"""`ddp-hpc profiles show NAME --sources`: the facts on which each line of a script depends."""

from __future__ import annotations

import pytest

from ddp_hpc.render.line_sources import ScriptLine, line_sources
from ddp_hpc.render.render_script import render
from ddp_hpc.request.job import Job
from ddp_hpc.sites.profile_tables import Launch, Source
from ddp_hpc.sites.site import Site, load_site
from tests.batch.conftest import run_cli


def line_with(text: str, lines: list[ScriptLine]) -> ScriptLine:
    (line,) = [one for one in lines if text in one.text]
    return line


def test_each_line_names_the_facts_without_which_it_would_be_different() -> None:
    lines = line_sources(Job(num_nodes=4, account="a_g"), load_site("perlmutter"))
    assert line_with("#SBATCH --constraint", lines).facts == ["slurm.constraint"]
    facts = line_with("#SBATCH --cpus-per-task", lines).facts
    assert {"node.cores", "node.threads", "node.devices"} <= set(facts)
    assert "default_walltime" in line_with("#SBATCH --time", lines).facts
    assert "env.always.HDF5_USE_FILE_LOCKING" in line_with("export HDF5_USE_FILE", lines).facts
    assert line_with("#SBATCH --nodes=4", lines).facts == []


def test_a_source_of_one_value_takes_precedence_over_a_source_of_its_table() -> None:
    sources = (Source(where="guide", of=("env",)), Source(where="mail", of=("env.always.A",)))
    site = Site(**{**vars(bare(load_site("generic_slurm"))), "sources": sources, "env": env_of(A="1", B="2")})
    lines = line_sources(Job(), site)
    assert line_with("export A=1", lines).sources == [1]
    assert line_with("export B=2", lines).sources == [0]


@pytest.mark.parametrize("num_nodes", [1, 4])
@pytest.mark.parametrize(
    ("profile", "launcher"),
    [("polaris", "mpiexec"), ("polaris", "torchrun"), *(("perlmutter", one) for one in ("srun", "torchrun"))],
)
def test_every_line_of_polaris_and_perlmutter_has_a_source_or_is_of_the_scheduler(
    profile: str, launcher: str, num_nodes: int
) -> None:
    site = load_site(profile)
    job = Job(num_nodes=num_nodes, launcher=launcher, account=f"a{site.account.suffix}")
    without_facts = render(job, bare(site)).splitlines()
    for line in line_sources(job, site):
        assert line.sources or (not line.facts and line.text in without_facts), line


def bare(site: Site) -> Site:
    """A site of the same scheduler, without facts of its own."""
    return Site(
        title=site.title,
        name=site.name,
        scheduler=site.scheduler,
        owner="",
        checked=site.checked,
        launch=Launch(default=site.launch.default),
        default_walltime="00:30:00",
    )


def env_of(**variables: str) -> object:
    from ddp_hpc.sites.profile_tables import Env

    return Env(always=variables)


def test_the_command_prints_the_script_with_numbered_sources() -> None:
    done = run_cli("profiles", "show", "polaris", "--sources", "--nodes", "4")
    text = done.stdout.decode()
    assert done.returncode == 0
    assert "#PBS -q debug-scaling\n        ^ default_queue, queues [" in text
    assert "\n[1] " in text
    assert " (read 20" in text
