"""Options of jobs that become directives: what each scheduler writes, what it refuses, and hostile values.

The expected options are those of sbatch(1), and of qsub(1B) and pbs_resources(7B) of OpenPBS.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from ddp_hpc.base.errors import RequestError
from ddp_hpc.lint.run_checks import lint_script
from ddp_hpc.render.render_script import render
from ddp_hpc.request.job import Job
from ddp_hpc.sites.site import load_site
from tests.batch.conftest import DIRECTIVES, run_cli

SLURM, PBS = "generic_slurm", "generic_pbs"


def directives(profile: str, **options: object) -> list[str]:
    text = render(Job(walltime_s=600, **options), load_site(profile))  # type: ignore[arg-type]
    return [line.split(" ", 1)[1] for line in text.splitlines() if line.startswith(DIRECTIVES)]


def added(profile: str, **options: object) -> list[str]:
    """The directives that these options add to a script, and in which other directives change."""
    plain = directives(profile)
    return [line for line in directives(profile, **options) if line not in plain]


@pytest.mark.parametrize(
    ("profile", "options", "expected"),
    [
        (SLURM, {"mem": "64G"}, ["--mem=64G"]),
        (SLURM, {"mem": "0"}, ["--mem=0"]),
        (SLURM, {"mem": "500GiB"}, ["--mem=500G"]),
        (PBS, {"mem": "64G"}, ["-l select=1:ncpus=1:mpiprocs=1:mem=64gb"]),
        (SLURM, {"exclusive": True}, ["--exclusive"]),
        (PBS, {"exclusive": True}, ["-l place=scatter:exclhost"]),
        (SLURM, {"constraint": "[a100|h100]"}, ["--constraint=[a100|h100]"]),
        (SLURM, {"reservation": "school"}, ["--reservation=school"]),
        (SLURM, {"dependency": "afterok:1:2,afterany:3_4"}, ["--dependency=afterok:1:2,afterany:3_4"]),
        (PBS, {"dependency": "afterok:1.pbs:2[].pbs"}, ["-W depend=afterok:1.pbs:2[].pbs"]),
        (SLURM, {"mail_type": "end,time_limit_80"}, ["--mail-type=END,TIME_LIMIT_80"]),
        (SLURM, {"mail_type": "END", "mail_user": "a@b.org"}, ["--mail-user=a@b.org", "--mail-type=END"]),
        (PBS, {"mail_type": "END,FAIL", "mail_user": "a@b.org"}, ["-M a@b.org", "-m ea"]),
        (PBS, {"mail_type": "ALL"}, ["-m bea"]),
        (PBS, {"mail_type": "none"}, ["-m n"]),
        (SLURM, {"array": "0-3,7%2"}, ["--array=0-3,7%2", "--output=%x-%A_%a.out"]),
        (PBS, {"array": "0-8:2%3"}, ["-J 0-8:2%3"]),
    ],
)
def test_an_option_becomes_the_directives_of_its_scheduler(
    profile: str, options: dict[str, object], expected: list[str]
) -> None:
    assert added(profile, **options) == expected


@pytest.mark.parametrize(
    ("profile", "options", "said"),
    [
        (PBS, {"constraint": "a100"}, "PBS has no constraints; it selects nodes by resources of a chunk"),
        (PBS, {"reservation": "R12"}, "Use --queue, such as --queue R123."),
        (PBS, {"mem": "0"}, "PBS cannot request the whole memory of a node"),
        (PBS, {"mail_type": "TIME_LIMIT"}, "PBS has no such event"),
        ("gadi", {"exclusive": True}, "without chunks"),
        (
            "sophia",
            {"mem": "8G", "queue": "by-gpu", "ranks_per_node": 2},
            "does not request one chunk per node",
        ),
        (PBS, {"array": "1,2"}, "only a single range with at least two indices"),
        (PBS, {"array": "3"}, "only a single range with at least two indices"),
        ("frontera_rtx", {"array": "0-3"}, "--array was given, but Frontera rtx (TACC) does not accept it"),
        ("frontera_rtx", {"mem": "8G"}, "--mem was given, but Frontera rtx (TACC) does not accept it"),
        ("local", {"exclusive": True}, "without a scheduler a job starts at once"),
    ],
)
def test_an_option_that_the_scheduler_or_the_site_does_not_have_is_refused(
    profile: str, options: dict[str, object], said: str
) -> None:
    with pytest.raises(RequestError) as caught:
        directives(profile, **options)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("profile", "options", "replaced", "expected"),
    [
        ("perlmutter", {"constraint": "gpu&hbm80g"}, "--constraint=gpu", "--constraint=gpu&hbm80g"),
        ("lumi_g", {"mem": "64G"}, "--mem=491520M", "--mem=64G"),
        ("polaris", {"exclusive": True}, "-l place=scatter", "-l place=scatter:exclhost"),
        ("cx3", {"mem": "8G"}, "-l select=1:ncpus=8:mpiprocs=1:mem=117760mb:ngpus=1",
         "-l select=1:ncpus=8:mpiprocs=1:ngpus=1:mem=8gb"),
    ],
)  # fmt: skip
def test_an_option_replaces_that_of_the_profile(
    profile: str, options: dict[str, object], replaced: str, expected: str
) -> None:
    assert replaced in directives(profile)
    found = directives(profile, **options)
    assert expected in found
    assert replaced not in found


def test_an_exclusive_job_does_not_repeat_the_option_of_the_profile() -> None:
    assert directives("lumi_g", exclusive=True).count("--exclusive") == 1


def test_memory_without_chunks_is_that_of_all_nodes() -> None:
    assert "-l mem=200gb" in directives("gadi", mem="100G", num_nodes=2)


HOSTILE = [
    "a b", "a'b", 'a"b', "a\nb", "a\n#SBATCH --x", "$(id)", "`id`", "a;b", "a\\b", "a\0b", "-x", "é",
    "\udcff", "a" * 99 + "\n", "a\tb", "a#b c", "{}", "${HOME}", "a\x7fb", "!",
]  # fmt: skip


@pytest.mark.parametrize("value", HOSTILE)
@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("mem", "{}"), ("mem", "64G{}"), ("constraint", "{}"), ("reservation", "{}"), ("dependency", "{}"),
        ("dependency", "afterok:{}"), ("dependency", "afterok:1,{}"), ("mail_type", "{}"),
        ("mail_type", "END,{}"), ("mail_user", "{}"),
        ("array", "{}"), ("array", "0-3{}"), ("array", "0-3%{}"), ("mail_user", "a@{}"),
    ],
)  # fmt: skip
def test_a_hostile_value_is_refused_on_one_line(option: str, text: str, value: str) -> None:
    more = {"mail_type": "END"} if option == "mail_user" else {}
    with pytest.raises(RequestError) as caught:
        Job(**{option: text.format(value)}, **more)  # type: ignore[arg-type]
    assert str(caught.value).isascii()
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("mem", "64", "with a unit"),
        ("mem", "1.5G", "not a whole number"),
        ("mem", "0G", "not a whole number"),
        ("dependency", "afterrok:1", 'did you mean "afterok"?'),
        ("dependency", "afterok", "does not name jobs"),
        ("dependency", "123", "unknown type"),
        ("array", "3-1", "not a list of indices"),
        ("array", "0-3%0", "not a list of indices"),
        ("mail_type", "ends", 'did you mean "END"?'),
        ("mail_user", "me", "without --mail-type"),
    ],
)
def test_a_mistake_in_a_value_is_explained(option: str, value: str, said: str) -> None:
    with pytest.raises(RequestError) as caught:
        Job(**{option: value})  # type: ignore[arg-type]
    assert said in str(caught.value)


ALL = ["--mem", "64G", "--exclusive", "--dependency", "afterany:1", "--mail-type", "END", "--mail-user", "me"]


@pytest.mark.parametrize(
    ("profile", "options"),
    [
        (SLURM, [*ALL, "--array", "0-3%2", "--constraint", "a100&ib", "--reservation", "r"]),
        (PBS, [*ALL, "--array", "0-3%2"]),
    ],
)
def test_lint_accepts_the_options_and_the_header_repeats_them(profile: str, options: list[str]) -> None:
    rendered = run_cli("render", "--profile", profile, "--walltime", "10m", *options)
    assert rendered.returncode == 0, rendered.stderr
    text = rendered.stdout.decode()
    assert [one for one in lint_script(text, load_site(profile)) if one.severity == "error"] == []
    (header,) = (line for line in text.splitlines() if line.startswith("# Written by "))
    again = run_cli(*shlex.split(header.partition(" with: ddp-hpc ")[2]))
    assert again.stdout == rendered.stdout


def test_a_job_file_can_contain_the_options(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(
        'profile = "generic_slurm"\nmem = "8G"\nexclusive = true\ndependency = "afterok:7"\n'
    )
    done = run_cli("render", "--job", str(tmp_path / "job.toml"))
    assert b"#SBATCH --mem=8G\n#SBATCH --exclusive\n#SBATCH --dependency=afterok:7\n" in done.stdout
