"""Rendered PBS scripts that are submitted and run: the effects of PBS, and how scripts handle them."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.site import Site, install, program
from tests.pbs.jobs import JOBS, ranks, recording_conda, render
from tests.waiting import PATIENCE

VENV = Path(sys.prefix)
TRAIN = ["python", "-m", "ddp_hpc.train", "--num-samples", "64", "--epochs", "1", "--batch-size", "4"]
TRAIN += ["--model", "linear", "--init-timeout", "60"]

# Stops after half a second, like a rank that saves its state, with a specific exit code.
SLOW_TO_STOP = """#!/bin/bash
trap 'sleep 0.5; echo saved >saved; exit 75' TERM
echo up >up
while :; do sleep 0.05; done
"""


def finished(site: Site, job_id: str) -> str:
    """The log of a job that succeeded and left no processes."""
    job = site.wait(job_id, timeout_s=120.0)
    assert (job["Exit_status"], job["left_over"]) == (0, []), site.logs()
    return site.log(job)


# Real training.


@pytest.mark.check
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
    assert "before the end of its walltime, so no other job is submitted" in said.splitlines()[-1]
    assert (site.work / "runs" / "ddp" / "state").read_text().startswith("requeue ")
    assert site.num_jobs() == 1


# The shipped jobs/polaris_ddp.pbs with 8 ranks of a recording `python`.


@pytest.fixture(scope="module")
def polaris(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Site, str]]:
    """A machine on which `qsub -A PROJECT jobs/polaris_ddp.pbs` has run, and the job's log."""
    site = install(
        tmp_path_factory.mktemp("polaris"),
        server="polaris-pbs-01.hsn.cm.polaris.alcf.anl.gov",  # with job ids as long as at the site
        default_chunk_ncpus=64,
    )
    before = 'echo "$TMPDIR" >"$HOME/tmpdir_of_pbs"\n'
    site.dotfile(site.pbs_bin, site.pals_bin, conda=recording_conda(site), more=before)
    yield site, finished(site, site.submit("-A", "PROJECT", JOBS / "polaris_ddp.pbs"))
    site.close()


def test_the_shipped_script_starts_four_ranks_on_each_of_two_nodes(polaris: tuple[Site, str]) -> None:
    site, log = polaris
    seen = ranks(site).values()
    places = [(rank.env["PALS_NODEID"], rank.env["PALS_LOCAL_RANKID"]) for rank in seen]
    assert places == [(node, local) for node in "01" for local in "0123"]
    assert {tuple(rank.argv) for rank in seen} == {("-m", "ddp_hpc.train")}
    assert log.startswith("ddp-hpc: job 12.polaris-pbs-01.hsn.cm.polaris.alcf.anl.gov: ")
    # The mpiexec of conda and that of PBS were skipped.
    assert f": {site.pals_bin}/mpiexec -n " in log
    assert not (site.home / "wrong_mpiexec_was_used").exists()


def test_the_shipped_script_corrects_what_pbs_sets(polaris: tuple[Site, str]) -> None:
    """The threads of the chunk, the umask, the home directory, and a TMPDIR that is too long for sockets."""
    site, seen = polaris[0], ranks(polaris[0]).values()
    assert len((site.home / "tmpdir_of_pbs").read_text()) > 41
    assert {(rank.env["NCPUS"], rank.env["OMP_NUM_THREADS"]) for rank in seen} == {("64", "8")}
    assert {(rank.env["PBS_JOBDIR"], rank.cwd) for rank in seen} == {(str(site.home), str(site.work))}
    assert {(rank.umask, rank.env["TMPDIR"]) for rank in seen} == {("0022", "/tmp")}


def test_the_sites_software_is_loaded_before_the_ranks_start(polaris: tuple[Site, str]) -> None:
    site = polaris[0]
    loaded = (site.home / "software.log").read_text().splitlines()
    assert loaded == ["module use /soft/modulefiles", "module load conda/2025-09-25", "conda activate base"]
    assert {rank.env["CONDA_PREFIX"] for rank in ranks(site).values()} == {f"{site.root}/soft/conda"}


# Other properties of submitted scripts.


def test_the_umask_of_the_user_takes_precedence_and_is_passed_to_the_ranks(site: Site) -> None:
    site.dotfile(site.pals_bin)
    script = render(site, "generic_pbs", command=["bash", "-c", 'echo "$(umask) $DDP_HPC_UMASK"'])
    assert finished(site, site.submit("-W", "umask=077", script)).splitlines()[-1] == "0077 0077"


@pytest.mark.check
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


def _wait_for(path: Path, text: str) -> None:
    end_s = time.monotonic() + PATIENCE * 60
    while not (path.exists() and text in path.read_text()):
        assert time.monotonic() < end_s, f"{text!r} never came to {path.name}"
        time.sleep(0.05)
