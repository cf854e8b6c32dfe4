"""Scripts for Flux and Grid Engine: their directives and launch lines. They do not requeue themselves.

Neither scheduler was available: the stand-ins follow the manual pages of flux-core and the scripts of
users of TSUBAME4.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_hpc.base.errors import RequestError
from ddp_hpc.render.render_script import render
from ddp_hpc.request.job import Job
from ddp_hpc.sites.site import load_site
from tests.batch.conftest import DIRECTIVES, Sandbox
from tests.batch.test_requeue import SAY, folder
from tests.batch.test_scripts_run import MODULES, script

FLUX = """#!/bin/bash
case $1 in
  resource) [[ $* == "resource list -s up -no {nnodes}" ]] && echo 2 ;;
  getattr) [[ $2 == jobid ]] && echo \u0192AbC ;;
  run)
    printf '%s\\0' "$@" >"$RECORD"
    env -0 >"$RECORD.env"
    """


def directives(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(DIRECTIVES)]


class TestFlux:
    def test_its_directives_are_options_of_flux_batch_and_the_time_has_a_unit(self) -> None:
        job = Job(num_nodes=2, account="bank1", queue="pbatch", walltime_s=5400)
        assert directives(render(job, load_site("tuolumne"))) == [
            "#flux: --job-name=ddp",
            "#flux: --nodes=2",
            "#flux: --exclusive",
            "#flux: --time-limit=5400s",
            "#flux: --queue=pbatch",
            "#flux: --setattr=bank=bank1",
            "#flux: --output=ddp-{{id}}.out",
        ]

    def test_ranks_are_started_by_flux_run_on_the_nodes_that_it_counts(self, sandbox: Sandbox) -> None:
        sandbox.program("flux", FLUX + f"{SAY}say done 9 ;;\nesac\n")
        done = sandbox.run(script("tuolumne", num_nodes=2), FLUX_URI="local:///x")
        assert done.returncode == 0, done.stderr
        assert sandbox.words()[:5] == ["run", "--exclusive", "--nodes=2", "--tasks-per-node=4", "env"]
        assert sandbox.seen()["DDP_HPC_PROFILE"] == "tuolumne"
        assert "ddp-hpc: job \u0192AbC: flux run --exclusive --nodes=2 " in done.stdout.decode()

    def test_a_run_that_is_not_done_says_how_to_go_on_by_hand(self, sandbox: Sandbox) -> None:
        sandbox.program("flux", FLUX + f"{SAY}say requeue 3 no time left ;;\nesac\n")
        done = sandbox.run(script("tuolumne"), FLUX_URI="local:///x")
        assert done.returncode == 75
        assert done.stdout.decode().endswith(
            "stopped at step 3: no time left; no successor is submitted under Flux; "
            f"to resume: cd {sandbox.work} && flux batch {folder(sandbox)}/job.sh\n"
        )

    def test_started_by_hand_it_says_how_to_submit_it(self, sandbox: Sandbox) -> None:
        done = sandbox.run(script("tuolumne"))
        assert done.returncode != 0
        assert b"submit this script with flux batch" in done.stderr


class TestGridEngine:
    def environ(self, sandbox: Sandbox) -> dict[str, str]:
        """The environment of a Grid Engine job on two nodes. Its list of hosts has three more columns."""
        hosts = sandbox.folder / "pe_hostfile"
        hosts.write_text("a 192 all.q@a UNDEFINED\nb 192 all.q@b UNDEFINED\n")
        modules = sandbox.folder / "modules.sh"
        modules.write_text(MODULES)
        given = {"PE_HOSTFILE": str(hosts), "NHOSTS": "2", "JOB_ID": "7", "TMPDIR": str(sandbox.folder)}
        return {**given, "SGE_O_WORKDIR": str(sandbox.work), "BASH_ENV": str(modules)}

    def script(self, **job: object) -> str:
        """A script without the line that loads the site's modules, which BASH_ENV defines instead."""
        return script("tsubame4", **job).replace("source /etc/profile.d/modules.sh\n", "")

    def test_its_directives_name_the_kind_of_node_and_no_group(self) -> None:
        text = render(Job(num_nodes=2, account="tga-x", walltime_s=5400), load_site("tsubame4"))
        assert directives(text) == [
            "#$ -N ddp",
            "#$ -S /bin/bash",
            "#$ -cwd",
            "#$ -l node_f=2",
            "#$ -l h_rt=01:30:00",
            "#$ -j y",
        ]
        assert "# No directive can set the account; submit this script with: qsub -g tga-x SCRIPT\n" in text

    def test_a_queue_is_a_kind_of_node(self) -> None:
        asked = render(Job(queue="node_q", ranks_per_node=1), load_site("tsubame4"))
        assert "#$ -l node_q=1\n" in asked
        with pytest.raises(
            RequestError, match=r"queue 'node_h' is not known .*TSUBAME4.* has the queues node_f, node_q"
        ):
            render(Job(queue="node_h"), load_site("tsubame4"))

    def test_open_mpi_is_told_the_nodes_in_its_own_spelling(self, sandbox: Sandbox) -> None:
        sandbox.launcher("mpiexec", version="Open MPI 5.0.7", then=f"{SAY}say done 9")
        done = sandbox.run(self.script(num_nodes=2), **self.environ(sandbox))
        assert done.returncode == 0, done.stderr
        words = sandbox.words()
        assert words[:5] == ["-n", "8", "--map-by", "ppr:4:node", "--bind-to"]
        hosts = words[words.index("--hostfile") + 1]
        assert hosts.startswith(f"{sandbox.folder}/tmp.")
        assert Path(hosts).read_text() == "a slots=4\nb slots=4\n"

    def test_a_run_that_is_not_done_says_how_to_go_on_with_its_group(self, sandbox: Sandbox) -> None:
        sandbox.launcher("mpiexec", version="Open MPI 5.0.7", then=f"{SAY}say requeue 3 no time left")
        done = sandbox.run(self.script(account="tga-x"), **self.environ(sandbox))
        assert done.returncode == 75
        assert done.stdout.decode().endswith(
            "no successor is submitted under Grid Engine; "
            f"to resume: cd {sandbox.work} && qsub -g tga-x {folder(sandbox)}/job.sh\n"
        )


@pytest.mark.parametrize("profile", ["tuolumne", "tsubame4"])
@pytest.mark.parametrize("asked", [{"launcher": "torchrun"}, {"launcher": "srun"}, {"qos": "debug"}])
def test_unsupported_options_are_refused(profile: str, asked: dict[str, str]) -> None:
    with pytest.raises(RequestError):
        render(Job(**asked), load_site(profile))  # type: ignore[arg-type]
