"""Rendered PBS scripts that are submitted and run: the effects of PBS, and how scripts handle them."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.pbs.directives import directive_lines
from tests.fakes.pbs.server import Settings
from tests.fakes.site import PROJECT, Site, install, program
from tests.pbs.conftest import MakeSite
from tests.pbs.jobs import JOBS, Seen, ranks, recording_conda, render

VENV = Path(sys.prefix)
TRAIN = ["python", "-m", "ddp_hpc.train", "--num-samples", "64", "--epochs", "1", "--batch-size", "4"]
TRAIN += ["--model", "linear", "--init-timeout", "60", "--summary", "summary.json"]
SCRIPTS = sorted([*JOBS.glob("*.pbs"), *(PROJECT / "tests" / "golden").glob("*.pbs")])

# Stops after half a second, like a rank that saves its state, with a specific exit code.
SLOW_TO_STOP = """#!/bin/bash
trap 'sleep 0.5; echo saved >saved; exit 75' TERM
echo up >up
while :; do sleep 0.05; done
"""
# A launcher that starts only one rank.
ONE_RANK = """#!/bin/bash
if [[ $1 == --version ]]; then echo "HYDRA build details:"; exit 0; fi
while [[ $1 == -* ]]; do shift 2; done
exec "$@"
"""


def world(site: Site) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((site.work / "summary.json").read_text())["world"]
    return found


def finished(site: Site, job_id: str) -> str:
    """The log of a job that succeeded and left no processes."""
    job = site.wait(job_id, timeout_s=120.0)
    assert (job["Exit_status"], job["left_over"]) == (0, []), site.logs()
    return site.log(job)


# Real training.


def test_a_polaris_script_trains_on_two_nodes_with_pals(alcf: Site) -> None:
    # The names of the fast network do not exist here, and both nodes are this machine.
    options = ["--nodes", "2", "--ranks-per-node", "1", "--env", "MASTER_ADDR=127.0.0.1"]
    script = render(alcf, "polaris", *options, command=TRAIN)
    log = finished(alcf, alcf.submit("-A", "PROJECT", script))
    assert (world(alcf)["launcher"], world(alcf)["world_size"], world(alcf)["local_size"]) == ("pals", 2, 1)
    assert f"ddp-hpc: job 12.pbs-srv: {alcf.pals_bin}/mpiexec -n 2 " in log
    assert "done: " in log


@pytest.mark.soak  # covered by the training that is deleted below
def test_a_generic_script_trains_with_pals(site: Site) -> None:
    site.dotfile(site.pals_bin, VENV / "bin")
    script = render(site, "generic_pbs", "--ranks-per-node", "2", command=TRAIN)
    finished(site, site.submit(script))
    assert (world(site)["launcher"], world(site)["world_size"], world(site)["local_size"]) == ("pals", 2, 2)


def test_a_generic_script_trains_with_hydra(make_site: MakeSite) -> None:
    site = make_site(nodes=(socket.gethostname(),))
    site.dotfile(site.pbs_bin, VENV / "bin")
    script = render(site, "generic_pbs", "--ranks-per-node", "2", command=TRAIN)
    finished(site, site.submit(script))
    assert (world(site)["launcher"], world(site)["world_size"]) == ("hydra", 2)


@pytest.mark.soak  # tests/rehearse has polaris_torchrun.pbs
def test_a_generic_script_trains_with_one_torchrun_agent_per_node(site: Site) -> None:
    site.dotfile(site.pals_bin, VENV / "bin")
    shutil.copy(JOBS / "torchrun_script.sh", site.work)
    script = render(site, "generic_pbs", "--launcher", "torchrun", "--ranks-per-node", "2", command=TRAIN)
    log = finished(site, site.submit(script))
    assert (world(site)["launcher"], world(site)["world_size"]) == ("torchrun", 2)
    assert "/torchrun_script.sh python " in log


def test_a_deleted_training_saves_its_state_in_time_and_leaves_no_process_and_no_successor(
    site: Site,
) -> None:
    site.dotfile(site.pals_bin, VENV / "bin")
    script = render(site, "generic_pbs", "--ranks-per-node", "2", command=[*TRAIN, "--epochs", "1000000"])
    job_id = site.submit("-k", "doe", script)
    log = site.work / "ddp.o12"
    _wait_for(log, "epoch 1/")
    site.run("qdel", job_id)
    job = site.wait(job_id)
    assert (job["Exit_status"], job["left_over"]) == (256 + 15, [])
    said = log.read_text()
    assert re.search(r"^world: 2 ranks on 1 node \(pals\)", said, re.MULTILINE)
    assert "error: " not in said
    assert "Traceback" not in said
    assert "before the end of the walltime, so nothing is submitted" in said.splitlines()[-1]
    assert (site.work / "runs" / "ddp" / "state").read_text().startswith("requeue ")
    assert site.num_jobs() == 1


# The shipped jobs/polaris_ddp.pbs with 8 ranks of a recording `python`.


@pytest.fixture(scope="module")
def polaris(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Site, str]]:
    """A machine on which `qsub -A PROJECT jobs/polaris_ddp.pbs` has run, and the job's log."""
    settings = Settings(
        server="polaris-pbs-01.hsn.cm.polaris.alcf.anl.gov",  # with job ids as long as at the site
        alcf_hook=True,
        default_chunk_ncpus=64,
        default_chunk_ngpus=4,
        keeper_pid=os.getpid(),
        obituary_s=0.0,
    )
    site = install(tmp_path_factory.mktemp("polaris"), settings)
    before = 'echo "$TMPDIR" >"$HOME/tmpdir_of_pbs"\n'
    site.dotfile(site.pbs_bin, site.pals_bin, conda=recording_conda(site), more=before)
    yield site, finished(site, site.submit("-A", "PROJECT", JOBS / "polaris_ddp.pbs"))
    site.close()


@pytest.fixture
def seen(polaris: tuple[Site, str]) -> dict[int, Seen]:
    return ranks(polaris[0])


def test_the_shipped_script_starts_four_ranks_on_each_of_two_nodes(seen: dict[int, Seen]) -> None:
    places = [(rank.env["PALS_NODEID"], rank.env["PALS_LOCAL_RANKID"]) for rank in seen.values()]
    assert places == [(node, local) for node in "01" for local in "0123"]
    assert {tuple(rank.argv) for rank in seen.values()} == {("-m", "ddp_hpc.train")}


def test_the_cores_of_the_chunk_do_not_become_the_threads_of_a_rank(seen: dict[int, Seen]) -> None:
    assert {rank.env["NCPUS"] for rank in seen.values()} == {"64"}
    assert {rank.env["OMP_NUM_THREADS"] for rank in seen.values()} == {"8"}


def test_the_umask_of_pbs_is_reset(seen: dict[int, Seen]) -> None:
    assert {rank.umask for rank in seen.values()} == {"0022"}


def test_ranks_run_in_the_directory_of_submission(polaris: tuple[Site, str], seen: dict[int, Seen]) -> None:
    assert {rank.env["PBS_JOBDIR"] for rank in seen.values()} == {str(polaris[0].home)}
    assert {rank.cwd for rank in seen.values()} == {str(polaris[0].work)}


def test_a_tmpdir_too_long_for_sockets_is_shortened(polaris: tuple[Site, str], seen: dict[int, Seen]) -> None:
    assert len((polaris[0].home / "tmpdir_of_pbs").read_text()) > 41
    assert {rank.env["TMPDIR"] for rank in seen.values()} == {"/tmp"}


def test_the_sites_software_is_loaded_before_the_ranks_start(
    polaris: tuple[Site, str], seen: dict[int, Seen]
) -> None:
    loaded = (polaris[0].home / "software.log").read_text().splitlines()
    assert loaded == ["module use /soft/modulefiles", "module load conda/2025-09-25", "conda activate base"]
    assert {rank.env["CONDA_PREFIX"] for rank in seen.values()} == {f"{polaris[0].root}/soft/conda"}


def test_the_mpiexec_of_conda_and_that_of_pbs_are_skipped(polaris: tuple[Site, str]) -> None:
    site, log = polaris
    assert f": {site.pals_bin}/mpiexec -n " in log
    assert not (site.home / "wrong_mpiexec_was_used").exists()


def test_the_site_forces_a_log_that_can_be_read_while_the_job_runs(polaris: tuple[Site, str]) -> None:
    site, log = polaris
    assert log.startswith("ddp-hpc: job 12.polaris-pbs-01.hsn.cm.polaris.alcf.anl.gov: ")
    assert (site.work / "ddp.o12").read_text() == log


# How PBS parses scripts, and what it refuses.


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_pbs_reads_every_directive_of_a_script(script: Path) -> None:
    text = script.read_text()
    lines = [line.removeprefix("#PBS ") for line in text.splitlines() if line.startswith("#PBS")]
    assert lines
    assert directive_lines(text) == lines


def test_the_directives_become_the_request(alcf: Site) -> None:
    alcf.dotfile(alcf.pals_bin, conda=recording_conda(alcf))
    job = alcf.wait(alcf.submit("-A", "PROJECT", JOBS / "polaris_ddp.pbs"))
    resources = {
        "select": "2:system=polaris",
        "place": "scatter",
        "walltime": "00:30:00",
        "filesystems": "home:eagle",
        "nodect": 2,
        "ncpus": 128,
        "ngpus": 8,
    }
    assert job["Resource_List"] == resources
    assert (job["Job_Name"], job["queue"], job["Join_Path"]) == ("ddp", "debug", "oe")


def test_alcf_refuses_the_shipped_script_without_an_account(alcf: Site) -> None:
    done = alcf.run("qsub", JOBS / "polaris_ddp.pbs")
    assert (done.returncode, done.stdout) == (32, "")
    assert done.stderr == "qsub: Account_Name is required to be set.\n"


def test_alcf_accepts_a_script_that_was_rendered_with_an_account(alcf: Site) -> None:
    script = render(alcf, "polaris", "--account", "PROJECT", command=["true"])
    job = alcf.wait(alcf.submit(script))
    assert (job["Account_Name"], job["Exit_status"]) == ("PROJECT", 0)


# Other properties of submitted scripts.


@pytest.mark.parametrize(("options", "umask"), [((), "0022"), (("-W", "umask=077"), "0077")])
def test_the_umask_of_the_user_takes_precedence_and_is_passed_to_the_ranks(
    site: Site, options: tuple[str, ...], umask: str
) -> None:
    site.dotfile(site.pals_bin)
    script = render(site, "generic_pbs", command=["bash", "-c", 'echo "$(umask) $DDP_HPC_UMASK"'])
    assert finished(site, site.submit(*options, script)).splitlines()[-1] == f"{umask} {umask}"


def test_names_repeated_in_the_node_file_count_once(site: Site) -> None:
    site.dotfile(site.pals_bin, recording_conda(site) / "bin")
    log = finished(site, site.submit(JOBS / "generic_pbs_ddp.pbs"))
    assert (site.root / "aux" / "12.pbs-srv").read_text().splitlines() == [
        *["x3001c0s1b0n0.hsn.cm.pbs.lab"] * 2,
        *["x3001c0s1b1n0.hsn.cm.pbs.lab"] * 2,
    ]
    assert "mpiexec -n 4 " in log
    assert [rank.env["PALS_NODEID"] for rank in ranks(site).values()] == ["0", "0", "1", "1"]


def test_the_job_does_not_need_the_submitted_file(site: Site) -> None:
    site.dotfile(site.pals_bin)
    script = render(site, "generic_pbs", command=["pwd"])
    moved = site.root / "elsewhere" / "job.pbs"
    moved.parent.mkdir()
    script.rename(moved)
    job_id = site.submit(moved)
    moved.unlink()
    assert str(site.work) in finished(site, job_id).splitlines()


def test_the_mpiexec_of_a_virtual_environment_is_skipped(site: Site) -> None:
    site.dotfile(site.pbs_bin, site.pals_bin)
    venv = recording_conda(site).rename(site.work / ".venv")
    (venv / "bin" / "activate").write_text(f'export VIRTUAL_ENV={venv} PATH="{venv}/bin:$PATH"\n')
    log = finished(site, site.submit(JOBS / "generic_pbs_ddp.pbs"))
    assert f": {site.pals_bin}/mpiexec -n " in log
    assert len(ranks(site)) == 4


def test_the_mpiexec_of_a_virtual_environment_is_used_if_it_is_the_only_one(site: Site) -> None:
    site.dotfile(site.pbs_bin)
    mpiexec = program(site.work / ".venv" / "bin" / "mpiexec", ONE_RANK)
    activate = f'export VIRTUAL_ENV={site.work}/.venv PATH="$PATH:{mpiexec.parent}"\n'
    (mpiexec.parent / "activate").write_text(activate)
    log = finished(site, site.submit(render(site, "generic_pbs", command=["echo", "a rank"])))
    assert f": {mpiexec} -n " in log
    assert log.splitlines()[-1] == "a rank"


def test_a_missing_launcher_is_reported_and_the_mpiexec_of_pbs_is_not_used(site: Site) -> None:
    site.dotfile(site.pbs_bin)
    job = site.wait(site.submit(JOBS / "generic_pbs_ddp.pbs"))
    assert job["Exit_status"] == 2
    assert "error: no mpiexec of an MPI library found on the PATH" in site.log(job)


def test_the_job_ends_with_the_largest_exit_code_of_its_ranks(site: Site) -> None:
    site.dotfile(site.pals_bin)
    command = ["bash", "-c", 'exit "$((PALS_RANKID * 3))"']
    script = render(site, "generic_pbs", "--nodes", "2", "--ranks-per-node", "1", command=command)
    assert site.wait(site.submit(script))["Exit_status"] == 3


def test_at_the_end_of_the_walltime_the_ranks_have_time_to_save(site: Site) -> None:
    site.dotfile(site.pals_bin)
    rank = program(site.root / "rank.sh", SLOW_TO_STOP)
    script = render(site, "generic_pbs", command=[str(rank)])
    job = site.wait(site.submit("-l", "walltime=2", script))
    log = site.log(job)
    assert (job["Exit_status"], job["left_over"]) == (-29, [])
    assert re.search(r"=>> PBS: job killed: walltime \d+ exceeded limit 2\n", log)
    assert (site.work / "saved").exists()
    assert "error: the program exited with code 75, but no checkpoint was recorded" in log


def test_ranks_that_do_not_stop_in_time_are_killed_with_the_job(make_site: MakeSite) -> None:
    site = make_site(kill_delay_s=0.5)
    site.dotfile(site.pals_bin)
    stubborn = ["bash", "-c", "trap '' TERM; echo up >up; while :; do sleep 0.05; done"]
    job_id = site.submit(render(site, "generic_pbs", command=stubborn))
    _wait_for(site.work / "up", "up")
    site.run("qdel", job_id)
    job = site.wait(job_id, timeout_s=10.0)
    assert (job["Exit_status"], job["left_over"]) == (256 + 15, [])


def _wait_for(path: Path, text: str) -> None:
    end_s = time.monotonic() + 60
    while not (path.exists() and text in path.read_text()):
        assert time.monotonic() < end_s, f"{text!r} never came to {path.name}"
        time.sleep(0.05)
