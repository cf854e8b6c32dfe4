"""The stand-in for the mpiexec of PALS behaves as its documentation says."""

from __future__ import annotations

import subprocess

from tests.fakes.site import Site
from tests.pbs.conftest import make_site, site

__all__ = ["make_site", "site"]


def pals(site: Site, *argv: str, hosts: str = "a.x b.x") -> subprocess.CompletedProcess[str]:
    nodefile = site.root / "nodefile"
    nodefile.write_text(hosts.replace(" ", "\n") + "\n")
    return site.run(site.pals_bin / "mpiexec", *argv, env={"PBS_NODEFILE": str(nodefile)})


def test_ranks_see_the_variables_of_pals_and_none_of_hydra(site: Site) -> None:
    options = ["-n", "4", "--ppn=2", "--depth", "16", "--cpu-bind", "list:24-31:16-23", "--env", "A=b c"]
    done = pals(site, *options, "bash", "-c", "env -0 >rank.$PALS_RANKID")
    assert done.returncode == 0, done.stderr
    for rank in range(4):
        words = (site.work / f"rank.{rank}").read_text().split("\0")[:-1]
        env = dict(word.split("=", 1) for word in words)
        said = {name: value for name, value in env.items() if name.startswith(("PALS_", "PMI_"))}
        apid, spool, fd = (said.pop(name) for name in ("PALS_APID", "PALS_SPOOL_DIR", "PMI_FD"))
        assert all((apid, spool, fd))
        local = {"PALS_LOCAL_RANKID": str(rank % 2), "PMI_LOCAL_RANK": str(rank % 2)}
        local |= {"PALS_LOCAL_SIZE": "2", "PMI_LOCAL_SIZE": "2", "PALS_DEPTH": "16"}
        world = {"PALS_RANKID": str(rank), "PMI_RANK": str(rank), "PMI_SIZE": "4"}
        assert said == {**local, **world, "PALS_NODEID": str(rank // 2)}
        assert env["A"] == "b c"
        assert not [name for name in env if name.startswith(("MPI_", "HYD"))]


def test_the_failure_of_one_rank_ends_the_others(site: Site) -> None:
    done = pals(site, "-n", "2", "bash", "-c", "((PALS_RANKID)) && exit 3; exec sleep 60")
    assert done.returncode == 3
    assert "b.x: rank 1 exited with code 3" in done.stderr


def test_the_largest_exit_code_is_returned(site: Site) -> None:
    codes = ["bash", "-c", "exit $((14 + 7 * PALS_RANKID))"]
    assert pals(site, "-n", "2", "--no-abort-on-failure", *codes).returncode == 21  # Hydra ORs them: 31
