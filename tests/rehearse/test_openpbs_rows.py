"""The stand-in behaves like a real OpenPBS 23.06.06: one test per difference that was found.

A stand-in on one machine cannot have these properties, so they have no tests:

- no signal reaches sister nodes at the walltime (the simulated nodes are only names);
- the full host names in `$PBS_NODEFILE` resolve, and the wheel's `mpiexec -launcher` works over TM;
- interactive jobs (`-I`) run (the stand-in acts as if there were no terminal);
- `resources_used` contains CPU time and memory (the stand-in reports zero);
- qrerun blocks for some time (only managers may use it; `Site.requeue` uses the job's daemon instead).
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ddp_hpc.rehearse.pbs import server
from tests.fakes.site import Site
from tests.pbs.conftest import MakeSite, make_site, site

__all__ = ["make_site", "site"]

USAGE_LINES = 7  # the usage that print_usage in qsub.c prints


def write(site: Site, *lines: str) -> Path:
    path = site.work / "a.sh"
    path.write_text("\n".join(["#!/bin/bash", *lines]) + "\n")
    return path


def qsub(site: Site, *options: str, directive: str = "") -> subprocess.CompletedProcess[str]:
    return site.run("qsub", *options, write(site, *([f"#PBS {directive}"] if directive else []), "true"))


def text_of(site: Site, job_id: str) -> str:
    return site.run("qstat", "-xfw", job_id).stdout


def test_pbs_own_mpiexec_answers_version_with_success(site: Site) -> None:
    done = site.run(site.pbs_bin / "mpiexec", "--version")
    assert (done.returncode, done.stdout) == (0, "pbs_version = 23.06.06\n")
    done = site.run(site.pbs_bin / "mpiexec", "-n", "1", "true")
    assert (done.returncode, done.stdout) == (1, "")


def test_a_job_with_an_unknown_dependency_is_accepted_and_dropped(site: Site) -> None:
    job = site.job(site.submit("-W", "depend=afterany:99", write(site, "touch ran")))
    assert (job["job_state"], job["substate"]) == ("F", 92)
    assert not {"stime", "Exit_status", "comment"} & set(job)


def test_a_job_with_afterok_on_a_failed_job_is_dropped(site: Site) -> None:
    failing = site.submit(write(site, "until [[ -e $PBS_O_WORKDIR/go ]]; do sleep 0.05; done; exit 3"))
    waiting = site.submit("-W", f"depend=afterok:{failing}", write(site, "true"))
    assert site.job(waiting)["depend"] == f"afterok:{failing}@pbs-srv"
    (site.work / "go").touch()
    job = site.wait(waiting)
    assert not {"stime", "Exit_status"} & set(job)


def test_a_job_lists_the_jobs_that_depend_on_it(site: Site) -> None:
    first = site.submit(write(site, "sleep 60"))
    second = site.submit("-W", f"depend=afterany:{first}", write(site, "true"))
    assert site.job(first)["depend"] == f"beforeany:{second}@pbs-srv"


ILLEGAL = "Illegal attribute or resource value"


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        pytest.param("nosuch=1", 187, "Unknown resource Resource_List.nosuch", id="unknown resource"),
        pytest.param("select=1:ncpus=x", 166, f"{ILLEGAL} select.ncpus", id="ncpus=x"),
        pytest.param("select=", 166, f"{ILLEGAL} Resource_List.select", id="select="),
        pytest.param("select=0", 166, ILLEGAL, id="select=0"),
        pytest.param("place=free", 7, 'Cannot have "place" without "select"', id="place without select"),
    ],
)
def test_invalid_resources_are_refused(site: Site, options: str, code: int, said: str) -> None:
    done = qsub(site, "-l", options)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", f"qsub: {said}\n")


@pytest.mark.parametrize(
    "options",
    [("-l", "nodes=2:ppn=4"), ("-l", "software=x"), ("-W", "umask=9"), ("-S", "/bin/zsh")],
    ids=" ".join,
)
def test_valid_options_are_accepted(site: Site, options: tuple[str, str]) -> None:
    assert qsub(site, *options).stdout == "12.pbs-srv\n"


def test_nodes_and_ppn_become_a_select(site: Site) -> None:
    job = site.job(site.submit("-l", "nodes=2:ppn=4", write(site, "true")))
    assert job["Resource_List"]["select"] == "2:ncpus=4:mpiprocs=4"


@pytest.mark.parametrize("option", ["-N two$", "-j no", "-k x", "-W umask=x"])
def test_a_bad_value_in_a_directive_ends_with_the_usage(site: Site, option: str) -> None:
    done = qsub(site, directive=option)
    first, *usage = done.stderr.splitlines()
    assert (done.returncode, first, len(usage)) == (2, f"qsub: illegal {option[:2]} value", USAGE_LINES)


@pytest.mark.parametrize(
    ("directive", "said"),
    [("-l a=1, b=2", "illegal -l value"), ("-Z", "invalid option -- 'Z'"), ("-r x", "illegal -r value")],
)
def test_an_invalid_option_in_a_directive_is_named_with_its_line(
    site: Site, directive: str, said: str
) -> None:
    done = qsub(site, directive=directive)
    assert done.returncode == 1
    assert done.stderr == f"qsub: {said}\nqsub: directive error: {directive} \n"


def test_the_usage_has_the_length_of_the_real_one(site: Site) -> None:
    done = qsub(site, "-Z")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1 + USAGE_LINES)


def test_a_directory_is_not_a_script(site: Site) -> None:
    done = site.run("qsub", site.home)
    assert (done.returncode, done.stderr) == (1, "qsub: script not a file\n")


def test_a_signal_to_a_waiting_job_is_refused(site: Site) -> None:
    held, done = site.submit("-h", write(site, "true")), site.submit(write(site, "true"))
    site.wait(done)
    answers = [site.run("qsig", "-s", "USR1", one) for one in (held, done)]
    assert [(a.returncode, a.stderr) for a in answers] == [
        (168, f"qsig: Request invalid for state of job {held}\n"),
        (35, f"qsig: Job has finished {done}\n"),
    ]


def test_a_signal_without_a_name_is_sigterm(site: Site) -> None:
    script = write(site, "trap '' TERM", "touch $PBS_O_WORKDIR/up", "sleep 60")
    job_id = site.submit(script)
    while not (site.work / "up").exists():
        assert site.job(job_id)["job_state"] in "QR"
    assert site.run("qsig", job_id).returncode == 0
    assert site.wait(job_id)["Exit_status"] == 271


@pytest.mark.parametrize(("word", "code"), [("99", 153), ("x1", 170)])
def test_the_json_of_a_qstat_error_has_no_jobs(site: Site, word: str, code: int) -> None:
    done = site.run("qstat", "-f", "-F", "json", word)
    assert done.returncode == code
    assert set(json.loads(done.stdout)) == {"timestamp", "pbs_version", "pbs_server"}


@pytest.mark.parametrize("ended", [False, True], ids=["running", "ended"])
def test_without_job_history_qstat_x_succeeds_without_a_job(make_site: MakeSite, ended: bool) -> None:
    site = make_site(history=False)
    job_id = site.submit(write(site, "true" if ended else "sleep 60"))
    site.wait(job_id, states="F" if ended else "R")
    done = site.run("qstat", "-xf", "-F", "json", job_id)
    assert (done.returncode, "Jobs" in json.loads(done.stdout)) == (0, False)
    assert done.stderr == f"qstat: PBS is not configured to maintain job history {job_id}\n"
    assert site.run("qstat", "-xf", job_id).stdout == ""
    plain = site.run("qstat", "-f", "-F", "json", job_id)
    assert (plain.returncode, "Jobs" in json.loads(plain.stdout)) == ((153, False) if ended else (0, True))


def test_the_walltime_is_a_clock(site: Site) -> None:
    job = site.job(site.submit("-l", "walltime=120", write(site, "true")))
    assert job["Resource_List"]["walltime"] == "00:02:00"


def test_json_types_match_those_of_qstat(site: Site) -> None:
    words = {"a": "005", "b": "1e3", "c": "nan", "d": "0x10", "e": "1e400"}
    variables = ",".join(f"{name}={value}" for name, value in words.items())
    job = site.job(site.submit("-A", "12", "-N", "7", "-v", variables, "-l", "select=1", write(site, "true")))
    assert (job["Account_Name"], job["Job_Name"]) == ("12", "7")
    shown = [job["Variable_List"][name] for name in words]
    assert shown == [5, 1000, "nan", "0x10", None]
    assert job["Resource_List"]["select"] == 1


def test_no_attribute_is_missing(site: Site) -> None:
    options = ("-l", "select=2:ncpus=4:mpiprocs=4:ngpus=4", "-l", "place=scatter")
    job = site.wait(site.submit(*options, write(site, "true")))
    names = "resources_used exec_host exec_vnode jobdir Rerunable mtime etime Priority project Submit_Host "
    names += "Stageout_status history_timestamp"
    assert set(names.split()) <= set(job)
    totals = {name: job["Resource_List"][name] for name in ("ncpus", "ngpus", "mpiprocs", "nodect")}
    assert totals == {"ncpus": 8, "ngpus": 8, "mpiprocs": 8, "nodect": 2}
    assert job["exec_host"] == "x3001c0s1b0n0/0*4+x3001c0s1b1n0/0*4"
    assert job["exec_vnode"] == "(x3001c0s1b0n0:ncpus=4:ngpus=4)+(x3001c0s1b1n0:ncpus=4:ngpus=4)"


def test_paths_contain_the_full_host_name(site: Site) -> None:
    job = site.job(site.submit(write(site, "true")))
    assert job["Output_Path"] == f"pbs-login.pbs.lab:{site.work}/a.sh.o12"
    assert job["Job_Owner"] == "pbsuser@pbs-login.pbs.lab"


def test_the_comment_names_the_user_who_deleted_a_job(site: Site) -> None:
    running, held = site.submit(write(site, "sleep 60")), site.submit("-h", write(site, "true"))
    site.wait(running, states="R")
    for job_id in (running, held):
        site.run("qhold", held)
        assert site.run("qdel", job_id).returncode == 0
    assert site.wait(running)["comment"].endswith(") and terminated by pbsuser@pbs-login.pbs.lab")
    comment = site.job(held)["comment"]
    assert re.fullmatch("Job held by pbsuser on .{24} and terminated by pbsuser@pbs-login.pbs.lab", comment)


def test_a_job_stays_running_after_sigterm_until_its_obituary(make_site: MakeSite) -> None:
    site = make_site(obituary_s=2.0)
    script = write(site, "trap 'touch $PBS_O_WORKDIR/over; exit' TERM", "touch up", "sleep 60 & wait")
    job_id = site.submit(script)
    while not (site.home / "up").exists():
        assert site.job(job_id)["job_state"] in "QR"
    site.run("qdel", job_id)
    while not (site.work / "over").exists():
        assert site.job(job_id)["job_state"] == "R"
    assert site.job(job_id)["job_state"] == "R"
    site.wait(job_id)


def test_a_held_job_waits(site: Site) -> None:
    job = site.job(site.submit("-h", write(site, "true")))
    assert (job["job_state"], job["Hold_Types"]) == ("H", "u")


def test_an_interactive_job_needs_a_terminal(site: Site) -> None:
    done = site.run("qsub", "-I")
    assert (done.returncode, done.stderr.splitlines()[0]) == (
        1,
        "qsub:\tstandard input and output must be a terminal for",
    )


def test_qrerun_refuses_ordinary_users(site: Site) -> None:
    done = site.run("qrerun", site.submit("-h", write(site, "true")))
    assert (done.returncode, done.stderr) == (159, "qrerun: Unauthorized Request  12.pbs-srv\n")


def test_a_job_with_a_private_sandbox_starts_in_its_own_directory(site: Site) -> None:
    script = write(site, "echo $PBS_JOBDIR; pwd")
    job = site.wait(site.submit("-W", "sandbox=PRIVATE", script))
    folder = f"{site.home}/pbs.12.pbs-srv.x8z"
    assert (job["Exit_status"], job["jobdir"]) == (0, folder)
    assert site.log(job).split() == [folder, folder]


def test_the_message_about_the_walltime_contains_the_used_time(site: Site) -> None:
    job = site.wait(site.submit("-j", "oe", "-l", "walltime=1", write(site, "sleep 60")))
    assert (job["Exit_status"], job["substate"]) == (-29, 93)
    assert re.match(r"=>> PBS: job killed: walltime [2-9] exceeded limit 1\n", site.log(job))
    assert job["comment"].endswith(" and exceeded resource walltime")


def test_the_log_of_a_requeued_job_has_both_runs(site: Site) -> None:
    waits = "until [[ -e $PBS_O_WORKDIR/go ]]; do sleep 0.05; done"
    script = write(site, "echo run; touch $PBS_O_WORKDIR/up.$RANDOM", waits)
    job_id = site.submit(script)
    while not list(site.work.glob("up.*")):
        assert site.job(job_id)["job_state"] in "QR"
    site.requeue(job_id, grace_s=0.0)
    while site.job(job_id).get("run_count") != 2:
        assert not (site.work / "a.sh.o12").exists()
    (site.work / "go").touch()
    assert site.log(site.wait(job_id)) == "run\nrun\n"


def test_the_text_output_is_wrapped_as_in_qstat(site: Site) -> None:
    job_id = site.submit("-l", "walltime=10", write(site, "true"))
    site.wait(job_id)
    narrow = site.run("qstat", "-xf", job_id).stdout
    assert narrow.startswith(f"Job Id: {job_id}\n    Job_Name = a.sh\n")
    assert "    Resource_List.walltime = 00:00:10\n" in narrow
    assert narrow.endswith("\n\n")
    assert max(map(len, narrow.splitlines())) <= 79
    assert narrow.replace("\n\t", "") == text_of(site, job_id)


def test_commands_fail_while_the_server_is_down(site: Site) -> None:
    (site.root / server.DOWN).touch()
    said = [site.run("qsub", "a.sh"), site.run("qstat", "-f", "12")]
    (site.root / server.DOWN).unlink()
    assert [one.returncode for one in said] == [111, 255]
    assert said[0].stderr == "Connection refused\nqsub: cannot connect to server pbs-srv (errno=111)\n"


def array_of(site: Site, body: str, *options: str) -> str:
    array = site.submit("-j", "oe", "-k", "oed", *options, write(site, body))
    assert array == "12[].pbs-srv"
    return array


def shown(site: Site, job_id: str, *names: str, flags: str = "-xf") -> list[Any]:
    done = site.run("qstat", flags, "-F", "json", job_id)
    assert done.returncode == 0, done.stderr
    return [[job.get(name) for name in names] for job in json.loads(done.stdout)["Jobs"].values()]


def test_the_state_of_an_array_follows_from_its_subjobs(site: Site) -> None:
    """Its exit code stands for that of the subjob that ended last, its substate for all of them."""
    body = "echo $PBS_ARRAY_ID $PBS_ARRAY_INDEX $PBS_JOBID; exit $PBS_ARRAY_INDEX"
    array = array_of(site, body, "-J", "0-2:2%1")
    parent = site.wait(array)
    for index in (0, 2):
        job = site.job(f"12[{index}].pbs-srv")
        assert (job["job_state"], job["Exit_status"], job["array_index"]) == ("F", index, index)
        assert site.log(job).split() == [array, str(index), f"12[{index}].pbs-srv"]
        assert job["Output_Path"].endswith(f"/a.sh.o12.{index}")
        assert "Submit_arguments" not in job
    assert (parent["Exit_status"], parent["substate"], parent["max_run_subjobs"]) == (1, 93, 1)
    assert parent["Output_Path"].endswith("/a.sh.o12.^array_index^")
    assert re.fullmatch(r"Job Array Began at \w+ \w+ \d\d at \d\d:\d\d and failed", parent["comment"])
    assert parent["array_indices_remaining"] == "-"


def test_subjobs_without_a_record_have_the_attributes_of_their_array(site: Site) -> None:
    array = array_of(site, "[[ $PBS_ARRAY_INDEX != 1 ]] || exit 3\nsleep 60", "-J", "1-6%2")
    site.wait("12[3].pbs-srv", states="R")
    names = ("job_state", "Exit_status", "array_index", "array_state_count", "array_indices_remaining")
    count = "Queued:3 Running:2 Exiting:0 Expired:1"
    waits = ["Q", 1, None, None, None]
    assert shown(site, array, *names, flags="-xtf") == [
        ["B", 1, None, count, "4-6"],
        ["X", 3, 1, None, None],
        ["R", None, 2, None, None],
        ["R", None, 3, None, None],
        *[waits] * 3,
    ]
    assert shown(site, "12[1]", "job_state", "comment", flags="-f")[0][0] == "X"
    assert site.run("qdel", "12[5]").returncode == 0
    assert shown(site, "12[5]", "job_state", "comment", "Exit_status") == [["X", "Subjob finished", 1]]
    assert shown(site, array, "array_indices_remaining") == [["4,6"]]
    assert site.run("qdel", array).returncode == 0
    parent = site.wait(array)
    assert (parent["substate"], parent["array_state_count"]) == (91, "Queued:0 Running:0 Exiting:0 Expired:4")
    ends = shown(site, array, "job_state", "comment", flags="-xtf")[1:]
    assert [state for state, _ in ends] == ["F"] * 6
    assert [comment for _, comment in ends].count("Subjob finished") == 4  # also that of subjob 1


def test_a_held_array_starts_no_subjobs(site: Site) -> None:
    array = array_of(site, "sleep 60", "-J", "1-4%2")
    site.wait("12[2].pbs-srv", states="R")
    site.run("qhold", array)
    names = ("job_state", "Hold_Types", "array_state_count")
    assert shown(site, array, *names) == [["H", "u", "Queued:2 Running:2 Exiting:0 Expired:0"]]
    site.run("qdel", "12[1]")
    site.wait("12[1].pbs-srv")
    assert shown(site, array, *names) == [["H", "u", "Queued:2 Running:1 Exiting:0 Expired:1"]]
    assert shown(site, "12[3]", "job_state", "Hold_Types") == [["Q", "u"]]


@pytest.mark.parametrize(
    ("operands", "code", "said"),
    [
        (["12[1]"], 55, "qdel: Request invalid for finished array subjob 12[1].pbs-srv\n"),
        (["12[9]"], 156, "qdel: Invalid request 12[9].pbs-srv\n"),
        (["12[7-9]"], 153, "qdel: Unknown Job Id 12[7-9].pbs-srv\n"),
        (["99[]"], 153, "qdel: Unknown Job Id 99[].pbs-srv\n"),
    ],
)
def test_qdel_refuses_subjobs_that_have_ended_or_do_not_exist(
    site: Site, operands: list[str], code: int, said: str
) -> None:
    array_of(site, "[[ $PBS_ARRAY_INDEX == 1 ]] || sleep 60", "-J", "1-3")
    site.wait("12[1].pbs-srv")
    done = site.run("qdel", *operands)
    assert (done.returncode, done.stderr) == (code, said)


def test_a_range_of_subjobs_is_deleted_and_then_the_array_has_finished(site: Site) -> None:
    array = array_of(site, "[[ $PBS_ARRAY_INDEX == 1 ]] || sleep 60", "-J", "1-4%2")
    site.wait("12[1].pbs-srv")
    site.wait("12[3].pbs-srv", states="R")
    assert site.run("qdel", "12[2-4]").returncode == 0
    assert site.wait(array)["substate"] == 91
    assert site.job("12[1].pbs-srv")["substate"] == 92
    for operand in (array, "12[2]"):
        done = site.run("qdel", operand)
        assert (done.returncode, done.stderr.split(" 12[")[0]) == (35, "qdel: Job has finished")
    assert site.run("qstat", "-f", "12[2]").returncode == 35


def test_without_history_an_ended_subjob_has_no_record(make_site: MakeSite) -> None:
    site = make_site(history=False)
    array = array_of(site, "[[ $PBS_ARRAY_INDEX != 1 ]] || exit 3\nsleep 60", "-J", "1-2")
    site.wait("12[1].pbs-srv")
    assert shown(site, "12[1]", "job_state", "comment", "array_index", flags="-f") == [
        ["X", "Subjob finished", None]
    ]
    site.run("qdel", array)
    site.wait("12[2].pbs-srv")
    assert site.run("qstat", "-f", array).returncode == 153
