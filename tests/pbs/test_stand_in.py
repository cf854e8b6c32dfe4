"""The stand-ins behave and fail like the real PBS and PALS."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.fakes.pbs.directives import directive_lines
from tests.fakes.site import Site
from tests.pbs.conftest import MakeSite

# The variables of a job of OpenPBS 23.06 with an account and without -v. Others are from the login shell.
OF_PBS = "PBS_ACCOUNT PBS_ENVIRONMENT PBS_JOBCOOKIE PBS_JOBDIR PBS_JOBID PBS_JOBNAME PBS_MOMPORT PBS_NODEFILE"
OF_PBS += " PBS_NODENUM PBS_O_HOME PBS_O_HOST PBS_O_INTERACTIVE_AUTH_METHOD PBS_O_INTERACTIVE_ENCRYPT_METHOD"
OF_PBS += " PBS_O_LOGNAME PBS_O_MAIL PBS_O_PATH PBS_O_QUEUE PBS_O_SHELL PBS_O_SYSTEM PBS_O_WORKDIR PBS_QUEUE"
OF_PBS += " PBS_TASKNUM NCPUS OMP_NUM_THREADS ENVIRONMENT TMPDIR HOME LOGNAME USER SHELL PATH PWD SHLVL _"


def write(site: Site, *lines: str, name: str = "a.sh", shebang: str = "#!/bin/bash") -> Path:
    path = site.work / name
    path.write_text("\n".join([shebang, *lines]) + "\n")
    return path


def output_of(site: Site, *lines: str, options: tuple[str, ...] = ()) -> list[str]:
    job = site.wait(site.submit(*options, write(site, "#PBS -j oe", *lines)))
    assert job["Exit_status"] == 0, site.logs()
    return site.log(job).splitlines()


# qsub.


@pytest.mark.parametrize(
    ("options", "message", "exit_code"),
    [
        (["-q", "nosuch"], "Unknown queue", 170),
        (["-q", "small"], "Access to queue is denied", 174),
        (["-q", "debug", "-l", "walltime=10"], "Job violates queue and/or server resource limits", 188),
        (["-q", "debug", "-l", "select=3"], "Job violates queue and/or server resource limits", 188),
        (["-l", "nosuch=1"], "Unknown resource Resource_List.nosuch", 187),
        (["-l", "select=1:nosuch=1"], "Unknown resource Resource_List.nosuch", 187),
        (
            ["-l", "select=1", "-l", "ncpus=4"],
            '"-lresource=" cannot be used with "select" or "place", resource is: ncpus',
            5,
        ),
        (["-l", "select=1", "-l", "nodes=1"], "Cannot be used with select or place: nodes", 6),
        (
            ["-l", "select=1,place=everywhere"],
            "Illegal attribute or resource value Resource_List.place",
            166,
        ),
        (["-N", "two words"], "illegal -N value", 2),
        (["-N", "n$USER"], "illegal -N value", 2),
        (["-N", "n" * 231], "Job name is too long", 2),
        (["-v", "NOT_SET_HERE"], "cannot send environment with the job", 1),
        (["-Z"], "invalid option -- 'Z'", 2),
    ],
)
def test_qsub_refuses(site: Site, options: list[str], message: str, exit_code: int) -> None:
    done = site.run("qsub", *options, write(site, "true"))
    assert (done.returncode, done.stdout) == (exit_code, "")
    assert done.stderr.splitlines()[0] == f"qsub: {message}"
    assert not list(site.root.glob("jobs/*"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("-l select=1 # one node", "qsub: directive error: -l select=1 # one node \n"),
        (
            "-l select=1:system=polaris, place=scatter",
            "qsub: illegal -l value\nqsub: directive error: -l select=1:system=polaris, place=scatter \n",
        ),
    ],
)
def test_qsub_refuses_a_directive(site: Site, line: str, message: str) -> None:
    done = site.run("qsub", write(site, f"#PBS {line}", "true"))
    assert (done.returncode, done.stdout, done.stderr) == (1, "", message)


def test_qsub_refuses_windows_line_ends(site: Site) -> None:
    (site.work / "a.sh").write_bytes(b"#!/bin/bash\r\ntrue\r\n")
    done = site.run("qsub", "a.sh")
    assert (done.returncode, done.stderr) == (1, "qsub: script contains cr, lf\n")


def test_qsub_refuses_a_missing_script(site: Site) -> None:
    done = site.run("qsub", "nosuch.sh")
    assert (done.returncode, done.stderr) == (1, "qsub: script file:: No such file or directory\n")


@pytest.mark.parametrize("missing", ["walltime", "filesystems"])
def test_alcfs_hook_requires_walltime_and_file_systems(alcf: Site, missing: str) -> None:
    given = [f"{name}={value}" for name, value in (("walltime", "600"), ("filesystems", "home"))]
    resources = [word for word in given if not word.startswith(missing)]
    done = alcf.run("qsub", "-A", "P", "-l", ",".join(resources), write(alcf, "true"))
    assert (done.returncode, done.stderr) == (32, f"qsub: Resource: {missing} is required to be set.\n")


def test_directives_end_at_the_first_command() -> None:
    script = (
        "#!/bin/bash\n\n# a comment\n#PBS -N one\n##PBS -N no\n# PBS -N no\n#PBS -q two\nset -e\n#PBS -N no\n"
    )
    assert directive_lines(script) == ["-N one", "-q two"]


def test_qsub_prints_only_the_job_id_and_ids_increase(site: Site) -> None:
    script = write(site, "true")
    assert [site.submit(script), site.submit(script)] == ["12.pbs-srv", "13.pbs-srv"]


def test_options_override_directives_for_each_resource(site: Site) -> None:
    script = write(site, "#PBS -N in_script", "#PBS -l select=1:ncpus=2,walltime=600")
    job = site.wait(site.submit("-l", "walltime=300", script))
    assert job["Job_Name"] == "in_script"
    assert job["Resource_List"]["select"] == "1:ncpus=2"
    assert job["Resource_List"]["walltime"] == "00:05:00"


@pytest.mark.parametrize(
    ("select", "why"),
    [
        ("1:system=aurora", "Insufficient amount of resource: system (aurora != polaris)"),
        ("3:ncpus=64", "Not enough total nodes available"),
    ],
)
def test_a_request_that_no_node_satisfies_is_accepted_and_waits_forever(
    site: Site, select: str, why: str
) -> None:
    job = site.job(site.submit("-l", f"select={select}", write(site, "touch ran")))
    assert (job["job_state"], job["comment"]) == ("Q", f"Can Never Run: {why}")


# The job.


def test_the_environment_has_no_variables_of_the_submitting_shell(site: Site) -> None:
    (site.home / ".bash_profile").unlink()
    lines = output_of(site, "env", options=("-A", "proj", "-l", "select=2:ncpus=4:mpiprocs=4"))
    env = dict(line.split("=", 1) for line in lines)
    assert set(env) - {"OLDPWD", "MANPATH"} <= set(OF_PBS.split())
    assert set(OF_PBS.split()) <= set(env)
    fixed = {"PBS_JOBID": "12.pbs-srv", "PBS_ENVIRONMENT": "PBS_BATCH", "ENVIRONMENT": "BATCH", "NCPUS": "4"}
    assert env | fixed == env
    assert env["PBS_O_WORKDIR"] == str(site.work)


@pytest.mark.parametrize(
    ("select", "threads", "lines"),
    [
        ("2:system=polaris", "64", "ab"),
        ("2:ncpus=4:mpiprocs=4", "4", "aaaabbbb"),
        ("2:ncpus=64:mpiprocs=4:ompthreads=16", "16", "aaaabbbb"),
        ("2:ncpus=4:mpiprocs=2:ngpus=1", "4", "aaaa"),
        ("1:ncpus=64:mpiprocs=2+1:ncpus=32:mpiprocs=1", "64", "aab"),
    ],
)
def test_the_node_file_has_one_line_per_mpiproc(alcf: Site, select: str, threads: str, lines: str) -> None:
    demanded = ("-A", "proj", "-l", "walltime=600,filesystems=home", "-l", f"select={select}")
    said, *nodefile = output_of(alcf, "echo $OMP_NUM_THREADS", "cat $PBS_NODEFILE", options=demanded)
    names = {"a": "x3001c0s1b0n0.hsn.cm.pbs.lab", "b": "x3001c0s1b1n0.hsn.cm.pbs.lab"}
    assert (said, nodefile) == (threads, [names[letter] for letter in lines])


def test_small_chunks_are_packed_unless_scattered(site: Site) -> None:
    for place, num_nodes in (("free", 1), ("scatter", 2)):
        options = ("-l", "select=2:ncpus=1", "-l", f"place={place}")
        assert output_of(site, "sort -u $PBS_NODEFILE | wc -l", options=options) == [str(num_nodes)]


def test_a_job_runs_a_copy_of_its_script_in_the_home_directory_with_umask_0077(site: Site) -> None:
    home, umask, script = output_of(site, "pwd", "umask", "echo $0")
    assert (home, umask) == (str(site.home), "0077")
    assert script == f"{site.root}/mom_priv/jobs/12.pbs-srv.SC"


def test_a_login_shell_in_the_shebang_reads_the_users_dotfiles(site: Site) -> None:
    site.dotfile(Path("/opt/of/mine"))
    script = write(site, "type module >/dev/null && echo $PATH", shebang="#!/bin/bash -l")
    assert site.log(site.wait(site.submit(script))).startswith("/opt/of/mine:")


def test_output_is_delivered_at_the_end_except_with_keep_files(site: Site) -> None:
    script = write(site, "echo begun", "until [[ -e $PBS_O_WORKDIR/go ]]; do sleep 0.05; done")
    later, at_once = site.submit(script), site.submit("-k", "doe", script)
    log = site.work / "a.sh.o13"
    while not (log.exists() and log.read_text()):
        assert site.job(at_once)["job_state"] in "QR"
    assert not (site.work / "a.sh.o12").exists()
    (site.work / "go").touch()
    for job_id in (later, at_once):
        assert site.log(site.wait(job_id)) == "begun\n"
    assert log.stat().st_mode & 0o777 == 0o600


def test_a_log_that_cannot_be_written_holds_the_job(site: Site) -> None:
    script = write(site, "touch $PBS_O_WORKDIR/ran")
    job = site.wait(site.submit("-k", "doe", "-j", "oe", "-o", "no/such/folder/log", script), states="H")
    assert (job["Hold_Types"], job["Exit_status"], job["run_count"]) == ("s", -3, 21)
    assert job["comment"] == "job held, too many failed attempts to run"
    assert not (site.work / "ran").exists()


@pytest.mark.parametrize(("last", "status"), [("exit 5", 5), ("kill -9 $PPID", 265), ("true", 0)])
def test_exit_status(site: Site, last: str, status: int) -> None:
    assert site.wait(site.submit(write(site, last)))["Exit_status"] == status


def test_a_script_with_a_missing_interpreter_exits_with_127_or_126(site: Site) -> None:
    # bash before 5.2 returns 126.
    assert site.wait(site.submit(write(site, "x", shebang="#!/no/such/shell")))["Exit_status"] in (126, 127)


def test_walltime_and_qdel_have_their_own_exit_status(site: Site) -> None:
    script = write(site, "sleep 60")
    timed, deleted = site.submit("-l", "walltime=1", script), site.submit(script)
    site.run("qdel", deleted)
    assert (site.wait(deleted)["Exit_status"], site.wait(timed)["Exit_status"]) == (271, -29)
    error = site.log(site.job(timed), "Error_Path")
    assert error.startswith("=>> PBS: job killed: walltime ")
    assert error.splitlines()[0].endswith("exceeded limit 1")


def test_processes_that_left_the_session_of_the_job_are_named_and_killed(site: Site) -> None:
    job = site.wait(site.submit(write(site, "setsid sleep 61 &", "exit 0")))
    assert job["left_over"] == ["sleep 61"]


def test_a_job_with_afterany_is_held_until_the_other_has_ended(site: Site) -> None:
    first = site.submit(write(site, "until [[ -e $PBS_O_WORKDIR/go ]]; do sleep 0.05; done; exit 3"))
    second = site.submit("-W", f"depend=afterany:{first}", write(site, "true", name="b.sh"))
    waiting = site.job(second)
    assert (waiting["job_state"], waiting["Hold_Types"]) == ("H", "s")
    assert waiting["depend"] == "afterany:12.pbs-srv@pbs-srv"
    (site.work / "go").touch()
    assert site.wait(second)["Exit_status"] == 0
    assert site.job(first)["Exit_status"] == 3


def test_an_invalid_dependency_is_refused(site: Site) -> None:
    done = site.run("qsub", "-W", "depend=x", write(site, "true"))
    assert (done.returncode, done.stderr.splitlines()[0]) == (2, "qsub: illegal -W value")
    assert site.num_jobs() == 0


def test_a_dependency_on_a_subjob_is_refused_and_one_on_the_array_is_not(site: Site) -> None:
    """As in parse_depend.c of OpenPBS."""
    array = site.submit("-J", "1-2", "-h", write(site, "true"))
    for subjob in ("12[1].pbs-srv", "12[1-2].pbs-srv"):
        done = site.run("qsub", "-W", f"depend=afterany:{subjob}", write(site, "true", name="b.sh"))
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.splitlines()[:2] == [
            "cannot have dependancy on subjob or range",
            "qsub: illegal -W value",
        ]
    assert site.submit("-W", f"depend=afterany:{array}", "b.sh") == "13.pbs-srv"


def test_a_requeued_job_has_the_same_id_and_environment(site: Site) -> None:
    script = write(site, "env >>$PBS_O_WORKDIR/env; until [[ -e $PBS_O_WORKDIR/go ]]; do sleep 0.05; done")
    job_id = site.submit(script)
    env = site.work / "env"
    for num_runs in (1, 2):
        while not (env.exists() and env.read_text().count("PBS_JOBID=") == num_runs):
            assert site.job(job_id)["job_state"] in "QR"
        if num_runs == 1:
            site.requeue(job_id, grace_s=0.0)
    (site.work / "go").touch()
    assert site.wait(job_id)["run_count"] == 2
    lines = env.read_text().splitlines()
    once = {line.partition("=")[0] for line in lines if lines.count(line) == 1}
    assert once == {"PBS_JOBCOOKIE"}


def test_a_signal_from_qsig_ends_a_job_although_its_script_traps_it(site: Site) -> None:
    script = write(site, "trap : USR1", "touch $PBS_O_WORKDIR/up", "while :; do sleep 0.05; done")
    job_id = site.submit(script)
    while not (site.work / "up").exists():
        assert site.job(job_id)["job_state"] in "QR"
    site.run("qsig", "-s", "USR1", job_id)
    assert site.wait(job_id)["Exit_status"] == 256 + 10


# qstat.


def test_qstat_shows_a_finished_job_only_with_x(site: Site) -> None:
    job_id = site.submit(write(site, "true"))
    site.wait(job_id)
    done = site.run("qstat", "-f", "-F", "json", job_id)
    assert done.returncode == 35
    assert "Job has finished, use -x or -H" in done.stderr


@pytest.mark.parametrize("command", [["qstat", "-xf", "-F", "json"], ["qdel"]])
def test_an_unknown_job(site: Site, command: list[str]) -> None:
    done = site.run(*command, "99.pbs-srv")
    assert (done.returncode, done.stderr) == (153, f"{command[0]}: Unknown Job Id 99.pbs-srv\n")


def test_text_that_looks_like_a_number_is_a_number_in_json(site: Site) -> None:
    job = site.job(site.submit("-v", "foo=005", "-l", "select=1", write(site, "true")))
    assert (job["Variable_List"]["foo"], job["Resource_List"]["select"]) == (5, 1)


# PALS's mpiexec.


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


def test_with_pmix_there_is_a_pmix_rank_and_no_local_rank_of_pmi(site: Site) -> None:
    done = pals(site, "-n", "1", "--pmi=pmix", "bash", "-c", 'echo "$PMIX_RANK ${PMI_LOCAL_RANK-none}"')
    assert done.stdout == "0 none\n"


@pytest.mark.parametrize("option", ["--map-by", "--frob=3", "-x", "--bind-to"])
def test_an_option_unknown_to_pals_is_refused(site: Site, option: str) -> None:
    done = pals(site, option, "touch", "ran")
    assert done.returncode == 1
    assert done.stderr.startswith(f"mpiexec: unrecognized option '{option}'\n")
    assert not (site.work / "ran").exists()


def test_more_ranks_than_slots_are_refused(site: Site) -> None:
    assert pals(site, "-n", "5", "--ppn", "2", "true").returncode == 1


def test_the_failure_of_one_rank_ends_the_others(site: Site) -> None:
    done = pals(site, "-n", "2", "bash", "-c", "((PALS_RANKID)) && exit 3; exec sleep 60")
    assert done.returncode == 3
    assert "b.x: rank 1 exited with code 3" in done.stderr


def test_the_largest_exit_code_is_returned(site: Site) -> None:
    codes = ["bash", "-c", "exit $((14 + 7 * PALS_RANKID))"]
    assert pals(site, "-n", "2", "--no-abort-on-failure", *codes).returncode == 21  # Hydra ORs them: 31


def test_outside_of_a_pbs_job_there_are_no_hosts(site: Site) -> None:
    done = site.run(site.pals_bin / "mpiexec", "-n", "1", "true")
    assert (done.returncode, done.stderr.splitlines()[0]) == (
        1,
        "mpiexec: no host list: not inside a PBS job, and no --hostfile",
    )


def test_jobs_are_killed_when_the_process_that_owns_the_machine_ends(make_site: MakeSite) -> None:
    with subprocess.Popen(["sleep", "60"]) as keeper:
        site = make_site(keeper_pid=keeper.pid)
        job_id = site.submit(write(site, "sleep 60"))
        keeper.kill()
    assert site.wait(job_id, timeout_s=5.0)["Exit_status"] == 265
