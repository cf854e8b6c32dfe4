"""Large and deeply nested scripts: the time of `ddp-hpc lint` grows only linearly."""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ddp_hpc.lint.parse_script import MAX_PARSED_CHARS, parse_script
from ddp_hpc.lint.run_checks import lint_script
from ddp_hpc.sites.site import load_site

PBS = "#!/bin/bash -l\n#PBS -l walltime=01:00:00\n"
SLURM = "#!/bin/bash\n#SBATCH --time=01:00:00\n"
_TIMES_LONGER = 8
# Linear time takes 8 times as long, quadratic time 64 times.
_MOST = 24
_MEASURABLE_S = 0.02

# Each with a number of repetitions with which the shorter script takes milliseconds.
GROWING: dict[str, tuple[int, Callable[[int], str]]] = {
    "directives": (1000, lambda n: SLURM + "#SBATCH --nodes=1\n" * n),
    "options on one line": (2000, lambda n: PBS + "#PBS " + "-q a " * n + "\n"),
    "resources on one line": (2000, lambda n: PBS + "#PBS -l " + "select=1," * n + "\n"),
    "an open quote in a directive": (2000, lambda n: SLURM + "#SBATCH --comment='" + "a " * n + "\n"),
    "a long quoted value": (25_000, lambda n: SLURM + "#SBATCH --comment='" + "a" * n + "'\n"),
    "a long pipeline": (1500, lambda n: SLURM + "trap x TERM\n" + "srun x | " * n + "cat &\n"),
    "launchers": (500, lambda n: SLURM + "#SBATCH -n 4\n" + "srun python train.py\n" * n),
    "$( nested": (500, lambda n: SLURM + "echo " + "$(echo " * n + "x" + ")" * n + "\n"),
    "(( nested": (500, lambda n: SLURM + "echo $" + "((" * n + "1" + "))" * n + "\n"),
    "{ nested": (500, lambda n: SLURM + "{ " * n + ":" + "; }" * n + "\n"),
    "quotes": (2000, lambda n: SLURM + "echo " + "'a'\"$(b)\"" * n + "\n"),
    "continued lines": (2000, lambda n: SLURM + "echo " + "a \\\n" * n + "b\n"),
    "here-documents": (500, lambda n: SLURM + "".join(f"cat <<E{i}\nx\nE{i}\n" for i in range(n))),
    "a here-document's word within a line": (15_000, lambda n: SLURM + "cat <<E\n" + " E" * n + "\nE\n"),
    "variables": (500, lambda n: SLURM + "".join(f"export V{i}=1\n" for i in range(n))),
    "functions": (500, lambda n: SLURM + "".join(f"f{i}() {{ echo; }}\n" for i in range(n))),
    "branches of case": (500, lambda n: SLURM + "case $x in\n" + "a) echo ;;\n" * n + "esac\n"),
    "a name that is nearly a secret's": (1000, lambda n: PBS + f"export {'API_KEY_' * n}x=abcdefghij\n"),
    "abbreviated options": (
        300,
        lambda n: SLURM + "".join(f"#SBATCH --ntasks-per-x{i}=1\n" for i in range(n)),
    ),
    "placeholders": (300, lambda n: SLURM + "#SBATCH --account=<a b {{c}} @D@\n" * n),
    "an open bracket": (1000, lambda n: SLURM + "#SBATCH --account=" + "<a" * n + "\n"),
    "log directories": (300, lambda n: SLURM + "#SBATCH -o a/b\n" * n + "mkdir -p a\n" * n),
    "late directives in quotes": (300, lambda n: SLURM + "cat <<E\n#SBATCH -N 1\nE\n" * n),
    "comments that silence a check": (1000, lambda n: SLURM + "# ddp-hpc: ignore[JOB001]\n" * n),
    "torchrun": (300, lambda n: SLURM + "#SBATCH -N 2\nsrun torchrun --nnodes=2 $A train.py\n" * n),
    "groups of a place": (3, lambda n: PBS + "#PBS -l place=" + "group=xexcl" * n + "!\n"),
}


def _cpu_s(text: str) -> float:
    begun_s = time.process_time()
    lint_script(text)
    return time.process_time() - begun_s


@pytest.mark.parametrize("name", GROWING)
def test_the_time_for_lint_does_not_grow_quadratically(name: str) -> None:
    number, script = GROWING[name]
    assert len(script(_TIMES_LONGER * number)) < MAX_PARSED_CHARS
    short_s = min(_cpu_s(script(number)) for _ in range(3))
    long_s = min(_cpu_s(script(_TIMES_LONGER * number)) for _ in range(2))
    assert long_s < _MOST * max(short_s, _MEASURABLE_S)


@pytest.mark.parametrize(
    "script",
    [
        SLURM + "#SBATCH --nodes=1\n" * 3000,
        SLURM + "".join(f"#SBATCH --qx{number}q=1\n" for number in range(3000)),
        PBS + "#PBS -l select=1" + "".join(f":qx{number}q=1" for number in range(3000)) + "\n",
    ],
    ids=["one option", "unknown options", "unknown resources"],
)
def test_only_a_limited_number_of_misspelled_words_is_compared(
    script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lookups = 0

    class Counting(difflib.SequenceMatcher[str]):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            nonlocal lookups
            lookups += 1
            super().__init__(*args, **kwargs)

    monkeypatch.setattr(difflib, "SequenceMatcher", Counting)
    lint_script(script)
    assert lookups <= 200


def test_a_case_with_many_branches_does_not_count_as_nested() -> None:
    assert lint_script(SLURM + "case $x in\n" + "a) echo ;;\n" * 500 + "esac\n") == []


def test_a_bash_that_crashes_finds_no_syntax_error() -> None:
    assert lint_script(SLURM + "echo " + "$(echo " * 5000 + "x" + ")" * 5000 + "\n") == []


def test_a_script_beyond_the_size_limit_is_truncated_at_a_line() -> None:
    body = "echo 0123456789012345678901234567890123456789\n"
    script = parse_script(SLURM + body * (MAX_PARSED_CHARS // len(body) + 10))
    assert {command.text for command in script.commands} == {body.strip()}


_PIECES = [
    *(
        "$(",
        "$((",
        "((",
        "(",
        ")",
        "))",
        "${",
        "}",
        "`",
        '"',
        "'",
        "$'",
        "{ ",
        "; ",
        "|",
        "&",
        "\\",
        "\n",
        " ",
    ),
    *(
        "<<E\n",
        "<<-E\n",
        "\tE\n",
        "E\n",
        "<(",
        "$[",
        "[[ ",
        "case x in a) ",
        "if ",
        "for ((",
        "x=",
        "export ",
    ),
    *("#SBATCH ", "#PBS ", "\n#SBATCH --nodes=1", "\n#PBS -l ", "select=", "place=", "group=", "excl", ":"),
    *(",", "--x", "-l ", "=", "--gres=gpu:", "9:", "API_KEY", "TOKEN=", "depend=", "afterok", "--signal=B:"),
    *("python ", "srun ", "mpiexec ", "-n 4 ", "torchrun ", "trap x TERM\n", "exec ", "\r", "\t", "\udcff"),
    *("#", "~", "/"),
]


@pytest.mark.soak
@settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    header=st.sampled_from([SLURM, PBS, SLURM + "#SBATCH -n 8\n#SBATCH -N 2\n", "#!/bin/sh\n"]),
    before=st.lists(st.sampled_from(_PIECES), max_size=4),
    unit=st.lists(st.sampled_from(_PIECES), min_size=1, max_size=5),
    times=st.sampled_from([1, 30, 1000, 20_000]),
    profile=st.sampled_from(["", "polaris", "perlmutter"]),
)
def test_scripts_with_repeated_text_are_read_in_seconds(
    header: str, before: list[str], unit: list[str], times: int, profile: str
) -> None:
    text = header + "".join(before) + "".join(unit) * times
    begun_s = time.process_time()
    for finding in lint_script(text, load_site(profile) if profile else None):
        assert len(finding.what) < 1000
    assert time.process_time() - begun_s < 15
