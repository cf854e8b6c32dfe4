"""Properties of every shipped profile, for all launchers and sizes."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from ddp_hpc.base.errors import RequestError
from ddp_hpc.base.units import parse_walltime_s
from ddp_hpc.lint.run_checks import lint_script
from ddp_hpc.render.rejection_warnings import advice
from ddp_hpc.render.render_script import render
from ddp_hpc.render.validate_site_profile import faults_of
from ddp_hpc.request.job import Job
from ddp_hpc.request.queue_choice import largest_num_nodes, size_of
from ddp_hpc.request.rank_layout import lay_out
from ddp_hpc.schedulers.registry import SCHEDULERS, scheduler_of_site
from ddp_hpc.sites.profile_tables import Queue
from ddp_hpc.sites.site import Site, load_site, profile_files, queue_entries
from tests.batch.conftest import DIRECTIVES, clean_environ
from tests.batch.test_written_scripts import SHELLCHECK

FOLDER = Path(__file__).parents[2] / "profiles"
NAMES = [path.stem for path in sorted(FOLDER.glob("*.toml"))]
# These profiles describe only a scheduler and no site.
GENERIC = {"generic_pbs", "generic_slurm", "local"}


def good_bash(files: list[Path]) -> None:
    found = subprocess.run([str(SHELLCHECK), *map(str, files)], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout


@pytest.mark.parametrize("name", NAMES)
def test_scripts_have_at_most_60_lines(name: str) -> None:
    """Comments and directives included, so that people read the script before they submit it."""
    site = load_site(name)
    for launcher in scheduler_of_site(site).writer.launchers:
        job = Job(num_nodes=at_most_two(site), launcher=launcher, command=("python", "train.py"))
        assert len(render(job, site).splitlines()) <= 60, launcher


@pytest.mark.parametrize("name", NAMES)
def test_the_default_script_is_valid_bash(name: str, tmp_path: Path) -> None:
    (file := tmp_path / "job.sh").write_text(render(Job(), load_site(name)))
    good_bash([file])


@pytest.mark.soak  # each shellcheck is a fifth of a second, and test_written_scripts.py has every launcher
@pytest.mark.parametrize("name", NAMES)
def test_all_scripts_are_valid_bash(name: str, tmp_path: Path) -> None:
    site = load_site(name)
    others = [
        render(Job(launcher=launcher), site)
        for launcher in SCHEDULERS[site.scheduler].writer.launchers
        if launcher != site.launch.default
    ]
    # For bash and shellcheck directives are comments and numbers are equal, so most sizes give the same
    # script.
    distinct = {
        re.sub(r"(?m)^#.*\n|\d+", "", text.removeprefix("#!")): text for text in [*scripts(name), *others]
    }
    files = [tmp_path / f"{number}.sh" for number in range(len(distinct))]
    for file, text in zip(files, distinct.values(), strict=True):
        file.write_text(text)
        subprocess.run(["bash", "-n", file], check=True)
    good_bash(files)


@pytest.mark.parametrize("name", NAMES)
def test_scripts_request_the_given_nodes_and_queue(name: str) -> None:
    site = load_site(name)
    asked = [directives(text) for text in scripts(name)]
    # The units of PBS depend on the site and are not always nodes.
    assert len(asked) == 1 or asked[0] != asked[1]
    for job, words in zip(sizes(site), asked, strict=True):
        if site.scheduler == "slurm":
            assert f"--nodes={job.num_nodes}" in words
            assert not job.queue or f"--{site.slurm.queue_option}={job.queue}" in words
        elif site.scheduler == "pbs":
            assert not job.queue or job.queue in words


@pytest.mark.parametrize("name", NAMES)
def test_lint_finds_no_problems_in_the_scripts(name: str) -> None:
    site = load_site(name)
    for job, text in zip(sizes(site), scripts(name), strict=True):
        found = lint_script(text, site, num_nodes=job.num_nodes)
        assert found == [], job.num_nodes
    for launcher in scheduler_of_site(site).writer.launchers:
        job = Job(num_nodes=at_most_two(site), launcher=launcher, account=an_account(site))
        assert lint_script(render(job, site), site, num_nodes=job.num_nodes) == [], launcher


@pytest.mark.parametrize("name", NAMES)
def test_scripts_contain_no_option_that_the_site_refuses(name: str) -> None:
    refused = set(load_site(name).slurm.forbidden)
    for text in scripts(name):
        assert not refused & set(text.replace("=", " ").split())


@pytest.mark.parametrize("name", NAMES)
def test_the_defaults_and_the_largest_job_are_within_the_limits_of_the_queues(name: str) -> None:
    site = load_site(name)
    for job in sizes(site):
        assert not [line for line in advice(job, site) if "exceed the limits" in line]


@pytest.mark.parametrize("name", NAMES)
def test_a_request_beyond_the_limits_of_a_named_queue_is_warned_about(name: str) -> None:
    site = load_site(name)
    queues = {(entry.name, entry.qos): None for entry in site.queues if entry.name and entry.submit}
    for queue, qos in queues:
        entries = queue_entries(site, queue, qos)
        job = Job(queue=queue, qos=qos, account=an_account(site))
        for asked in beyond(job, entries):
            (line,) = [line for line in advice(asked, site) if "exceed the limits" in line]
            assert f"exceed the limits of queue {queue}" in line


@pytest.mark.parametrize("name", NAMES)
def test_a_request_beyond_the_limits_of_all_queues_is_refused(name: str) -> None:
    site = load_site(name)
    for asked in beyond(Job(account=an_account(site)), site.queues):
        with pytest.raises(RequestError, match=r"no queue of .* took .* Use other --nodes"):
            render(asked, site)


def beyond(job: Job, entries: Sequence[Queue]) -> list[Job]:
    """Jobs with one node more, and with one second more, than any of the queues takes."""
    jobs = []
    if entries and all(entry.max_nodes for entry in entries):
        jobs.append(replace(job, num_nodes=max(entry.max_nodes for entry in entries) + 1))
    if entries and all(entry.max_walltime for entry in entries):
        longest_s = max(parse_walltime_s(entry.max_walltime) for entry in entries)
        jobs.append(replace(job, walltime_s=longest_s + 1))
    return jobs


@pytest.mark.parametrize("name", NAMES)
def test_the_check_of_the_profile_finds_no_problems(name: str) -> None:
    assert faults_of(FOLDER / f"{name}.toml") == []


@pytest.mark.parametrize("name", NAMES)
def test_a_profile_has_an_owner_a_confidence_and_a_date(name: str) -> None:
    site = load_site(name)
    assert site.owner
    assert site.sources or site.scheduler == "local"
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", site.checked)
    assert site.confidence or name in GENERIC


@cache
def scripts(name: str) -> list[str]:
    site = load_site(name)
    return [render(job, site) for job in sizes(site)]


def sizes(site: Site) -> list[Job]:
    """One node, two, and the maximum of the largest queue, with the maximum walltime of that queue."""
    if site.scheduler == "local":
        return [Job()]
    jobs = [Job(account=an_account(site))]
    if largest_num_nodes(site) != 1:
        jobs.append(Job(num_nodes=2, account=an_account(site)))
    queues = [queue for queue in site.queues if queue.submit and not queue.qos and holds(queue, site)]
    if queues:
        largest = max(queues, key=most_nodes)
        walltime_s = parse_walltime_s(largest.max_walltime) if largest.max_walltime else None
        jobs.append(
            replace(jobs[0], num_nodes=most_nodes(largest), queue=largest.name, walltime_s=walltime_s)
        )
    return jobs


def at_most_two(site: Site) -> int:
    """Two nodes, or one if a GPU job of two is impossible."""
    return min(2, largest_num_nodes(site) or 2) if scheduler_of_site(site).has_queue else 1


def an_account(site: Site) -> str:
    has_queue = scheduler_of_site(site).has_queue
    return f"{site.account.prefix}proj{site.account.suffix}" if has_queue else ""


def holds(queue: Queue, site: Site) -> bool:
    """Whether the queue allows all devices of a node: Kestrel's debug allows only half of them."""
    job = Job(num_nodes=most_nodes(queue), queue=queue.name, qos=queue.qos)
    layout = lay_out(job, site)
    size = size_of(job, site, queue, layout.ranks_per_node, layout.devices, None)
    return not queue.max_devices or size.num_devices <= queue.max_devices


def most_nodes(queue: Queue) -> int:
    """The limit of the queue; without a limit, more nodes than its minimum."""
    return queue.max_nodes or queue.min_nodes + 1


def directives(script: str) -> list[str]:
    lines = [line for line in script.splitlines() if line.startswith(DIRECTIVES)]
    return [word for line in lines for word in line.split()[1:]]


def test_all_profiles_render_without_torch_mpi4py_and_h5py() -> None:
    program = """
import sys
for name in ("torch", "mpi4py", "h5py", "numpy"):
    sys.modules[name] = None  # makes an import of it fail
from ddp_hpc.cli import cli
for name in sys.argv[1:]:
    cli.main(["render", "--profile", name], standalone_mode=False)
cli.main(["render", "--step"], standalone_mode=False)
"""
    argv = [sys.executable, "-c", program, *NAMES]
    done = subprocess.run(argv, env=clean_environ(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("#!/bin/bash") == len(NAMES) + 1


def test_a_profile_in_the_users_directory_replaces_the_shipped_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    folder = tmp_path / "ddp-hpc" / "profiles"
    folder.mkdir(parents=True)
    text = profile_files()["local"].read_text()
    (folder / "local.toml").write_text(text.replace("this machine, no scheduler", "my own"))
    assert load_site("local").title == "my own"


@pytest.mark.parametrize("name", NAMES)
def test_each_variable_of_a_site_is_explained(name: str) -> None:
    """By a comment above the first variable of a group or at the end of the line."""
    site = load_site(name)
    script = render(Job(num_nodes=at_most_two(site)), site).splitlines()
    variables = {**site.env.always, **site.env.multi_node}
    for number, line in enumerate(script):
        variable = line.strip().removeprefix("export ").partition("=")[0]
        if line.strip().startswith("export ") and variable in variables:
            assert "  # " in line or script[number - 1].strip().startswith("# "), line
