"""Thousands of hostile requests for all profiles: each is refused, or adds no directive and executes nothing.

The header, the exports and the launch line of a script contain the request; bash runs these for all
scripts together, with a launcher that prints its arguments. The header must reproduce the request exactly.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from ddp_hpc.base.errors import RequestError
from ddp_hpc.render.render_script import render
from ddp_hpc.render.shell_quoting import sh
from ddp_hpc.request.job import Job
from ddp_hpc.sites.site import Site, load_site
from tests.batch.conftest import DIRECTIVES
from tests.batch.test_every_profile import NAMES
from tests.batch.test_hostile_words import FRAGMENTS

HARMLESS: dict[str, object] = {
    "name": "job", "queue": "q", "qos": "qos", "account": "acct", "filesystems": "home", "fallback": "f",
    "constraint": "a100", "reservation": "r", "dependency": "afterany:1",
    "launcher": "torchrun", "mpi": "pmi2", "run_dir": "runs/x", "env": {"VALUE": "v", "OTHER": "w"},
    "setup": (": x", ": y"), "command": ("python", "train.py", "a", "b"),
}  # fmt: skip
# Requests with only these characters are not refused as invalid values of directives or lists.
QUOTED = ("run_dir", "env", "command")
MORE = [
    "\n#PBS -q x\n",
    "\n#$ -q x",
    "\0",
    "--",
    "-",
    "\udcff",
    "x" * 10_000,
    "((",
    "<(id)",
    "\x7f",
]
CHARACTERS = st.characters(exclude_categories=["Cs"])
WORD = st.lists(st.sampled_from(FRAGMENTS + MORE) | st.text(CHARACTERS, max_size=4), min_size=1, max_size=3)
HOSTILE = WORD.map("".join)
# Characters without a special meaning for any scheduler.
OF_A_DIRECTIVE = re.compile(r"#\$?[A-Za-z0-9_.:@+,=&|/()\[\]*~%{} -]+")
NUMBER = st.none() | st.integers(-1, 5)
# Only one field of a request is hostile, or several of those that a script quotes.
WHICH = st.booleans().flatmap(
    lambda kind: (
        st.sets(st.sampled_from(QUOTED), min_size=1)
        if kind
        else st.sampled_from(sorted(HARMLESS)).map(lambda name: {name})
    )
)


@dataclass(frozen=True)
class Asked:
    """One request that was not refused, and its script."""

    job: Job
    site: Site
    script: str


@st.composite
def requests(draw: st.DrawFn) -> dict[str, object]:
    """The fields of a job."""
    job: dict[str, object] = {"num_nodes": draw(st.sampled_from([1, 2, 1, 0])), "walltime_s": 600}
    for number in ("ranks_per_node", "gpus_per_node", "cpus_per_node", "min_nodes"):
        if draw(st.integers(0, 15)) == 0:
            job[number] = draw(NUMBER)
    for field in draw(WHICH):
        plain = HARMLESS[field]
        if isinstance(plain, str):
            job[field] = draw(HOSTILE)
        elif isinstance(plain, dict):
            job[field] = {draw(st.just("VALUE") | HOSTILE): draw(HOSTILE), "OTHER": draw(HOSTILE)}
        elif field == "setup":
            job[field] = (draw(HOSTILE), ": y")
        else:
            first = draw(st.sampled_from(["python", "./run", ""])) or draw(HOSTILE)
            job[field] = (first, "train.py", draw(HOSTILE), draw(HOSTILE))
    return job


def ask(how_many: int, site: Site) -> list[Asked]:
    """Renders `how_many` requests and checks the lines of the scripts. Returns those that were not refused.

    The seed is the profile's own: where CI is set, Hypothesis derandomizes, and all profiles would be asked
    the same few requests.
    """
    scripts: list[Asked] = []
    complaints: set[bool] = set()
    made = 0

    @settings(
        max_examples=how_many, deadline=None, database=None, phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @seed(NAMES.index(site.name))
    @given(requests())
    def one(request: dict[str, object]) -> None:
        nonlocal made
        made += 1
        try:
            asked = Asked(job := Job(**request), site, render(job, site))  # type: ignore[arg-type]
        except RequestError as error:
            complaints.add("\n" in str(error))
            return
        no_line_of_its_own(asked)
        scripts.append(asked)

    one()
    assert made >= how_many
    assert complaints <= {False}
    return scripts


def no_line_of_its_own(asked: Asked) -> None:
    """The script has the same directives and number of lines as that of a harmless request."""
    job = asked.job
    same = {
        field.name: harmless if isinstance(value := getattr(job, field.name), str) else shape(harmless, value)
        for field in fields(Job)
        if (harmless := HARMLESS.get(field.name)) and getattr(job, field.name) not in ("", (), {})
    }
    # These fields select the kind of script, so they stay unchanged.
    chosen = {name: getattr(job, name) for name in ("launcher", "mpi", "fallback")}
    chosen["env_style"] = "torchrun" if "export DDP_HPC_LAUNCH=" in asked.script else "none"
    harmless_lines = render(replace(job, **{**same, **chosen}), asked.site).split("\n")
    lines = asked.script.split("\n")
    flags = [flag(line) for line in lines if flag(line)]
    assert flags == [flag(line) for line in harmless_lines if flag(line)]
    assert all(OF_A_DIRECTIVE.fullmatch(line) for line in lines if flag(line))
    assert not set(asked.script) & set("\0\r")


def shape(harmless: object, value: object) -> object:
    """The same number of harmless words."""
    if isinstance(value, dict):
        return {f"NAME{number}": "v" for number in range(len(value))}
    assert isinstance(harmless, tuple)
    return harmless[: len(value)]  # type: ignore[arg-type]


def flag(line: str) -> str:
    """The option of a directive, or an empty string for other lines."""
    return line.split("=")[0].split()[1] if line.startswith(DIRECTIVES) else ""


def parts(asked: Asked) -> Iterator[str]:
    """The parts of a script that contain words of the request, changed to print their expansion."""
    lines = asked.script.split("\n")
    yield from (line for line in lines if line.lstrip().startswith("export "))
    start = next(index for index, line in enumerate(lines) if line.startswith("exec python -m ddp_hpc.job "))
    yield from (line.removeprefix("exec ") for line in lines[start:])
    yield 'show "$DDP_HPC_RUN_DIR" "${VALUE-}" "${OTHER-}"'
    (header,) = (line for line in lines if line.startswith("# Written by ddp-hpc "))
    yield "show " + header.partition(" with: ")[2]


PRELUDE = """\
show() { printf '%s\\0' "$#" "$@"; }
python() { show "$@"; }
srun() { show "$@"; }
ibrun() { show "$@"; }
num_nodes=2 num_ranks=2 mpiexec=show step_script=show per_node=(-x) hosts=hosts
"""


def shown(scripts: list[Asked], folder: Path) -> list[list[list[str]]]:
    """The output of the three kinds of parts of each script, from one bash process."""
    (folder / "a.txt").touch()  # a match for *
    program = PRELUDE + "".join(f"(\n{chr(10).join(parts(asked))}\n)\n" for asked in scripts)
    file = folder / "parts.sh"
    file.write_bytes(program.encode("utf-8", "surrogateescape"))
    done = subprocess.run(["bash", file], cwd=folder, capture_output=True, timeout=200)
    assert not done.stderr, done.stderr[:2000]
    assert sorted(path.name for path in folder.iterdir()) == ["a.txt", "parts.sh"]
    words = iter(done.stdout.decode("utf-8", "surrogateescape").split("\0")[:-1])
    lists = [[next(words) for _ in range(int(count))] for count in words]
    assert len(lists) == 3 * len(scripts)
    return [lists[at : at + 3] for at in range(0, len(lists), 3)]


def options(job: Job) -> Iterator[str]:
    """Words that must be in the header."""
    for option, value in (
        ("--queue", job.queue), ("--qos", job.qos), ("--account", job.account), ("--run-dir", job.run_dir),
        ("--filesystems", job.filesystems), ("--fallback", job.fallback), ("--constraint", job.constraint),
        ("--reservation", job.reservation), ("--dependency", job.dependency),
    ):  # fmt: skip
        if value:
            yield f"{option} {value}"
    yield from (f"--env {name}={value}" for name, value in job.env.items())
    yield from (f"--setup {line}" for line in job.setup if line)


def check(how_many: int, folder: Path) -> None:
    each = -(-how_many // len(NAMES))
    scripts = [asked for name in NAMES for asked in ask(each, load_site(name))]
    # Most generated requests are not refused.
    assert len(scripts) > how_many / 5
    for asked, (launched, values, header) in zip(scripts, shown(scripts, folder), strict=True):
        job = asked.job
        assert launched[-len(job.command) :] == list(job.command)
        run_dir = job.run_dir or f"runs/{job.name}"
        assert values[0] == (run_dir if run_dir.startswith("/") else f"{folder}/{run_dir}")
        assert values[1:] == [job.env.get("VALUE", ""), job.env.get("OTHER", "")]
        assert header[:2] == ["ddp-hpc", "render"]
        assert job.command == Job().command or header[-len(job.command) :] == list(job.command)
        assert set(options(job)) <= {f"{one} {two}" for one, two in pairwise(header)}


def test_hostile_requests_run_nothing_and_add_no_directive(tmp_path: Path) -> None:
    check(1000, tmp_path)


@pytest.mark.soak
def test_5000_hostile_requests_run_nothing_and_add_no_directive(tmp_path: Path) -> None:
    check(5000, tmp_path)


@pytest.mark.parametrize("quoting", [lambda word: f'"{word}"', lambda word: word])
def test_the_check_of_the_parts_detects_a_wrongly_quoted_word(quoting: object, tmp_path: Path) -> None:
    job = Job(command=("./run", "$(touch canary)"))
    script = render(job, load_site("generic_slurm"))
    broken = script.replace(sh("$(touch canary)"), quoting("$(touch canary)"))  # type: ignore[operator]
    assert broken != script
    with pytest.raises(AssertionError):
        shown([Asked(job, load_site("generic_slurm"), broken)], tmp_path)


def test_the_check_of_the_lines_detects_an_additional_directive() -> None:
    asked = Asked(job := Job(queue="q"), site := load_site("generic_pbs"), render(job, site))
    no_line_of_its_own(asked)
    broken = replace(asked, script=asked.script.replace("#PBS -q q", "#PBS -q q\n#PBS -V"))
    with pytest.raises(AssertionError):
        no_line_of_its_own(broken)
