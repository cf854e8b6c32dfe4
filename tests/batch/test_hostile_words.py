"""Input of users is refused or passed on unchanged; it is never executed."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ddp_hpc.base.errors import RequestError
from ddp_hpc.render.render_script import render
from ddp_hpc.request.job import Job
from ddp_hpc.sites.site import load_site
from tests.batch.conftest import Sandbox
from tests.batch.test_scripts_run import slurm

FRAGMENTS = [
    "$(touch canary)", "`touch canary`", "; touch canary;", "\ntouch canary\n", "' ; touch canary '",
    '"', "'", "\\", "\\'", "$HOME", "${IFS}", "&& touch canary", "| touch canary", "> canary", "# ",
    "\n#SBATCH -A x\n", "\r", "\t", "\x1b[0m", "!", "*", "~", "{a,b}", "=", ":", "-x", "", " ",
    "\u00e9", "\u2028", "{{ 1 }}", "{% x %}",
]  # fmt: skip
CHARACTERS = st.characters(exclude_categories=["Cs"], exclude_characters="\0")
WORDS = st.lists(st.sampled_from(FRAGMENTS) | st.text(CHARACTERS, max_size=6), max_size=3).map("".join)
PLAIN_OR_HOSTILE = st.just("") | WORDS


@pytest.mark.check
@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    name=st.just("ddp") | WORDS,
    queue=PLAIN_OR_HOSTILE,
    account=PLAIN_OR_HOSTILE,
    run_dir=PLAIN_OR_HOSTILE.filter(lambda path: not path.startswith("/")),  # the script creates it
    value=WORDS,
    command=st.lists(WORDS, max_size=4),
)
def test_hostile_arguments_are_not_executed_and_reach_the_command_unchanged(
    name: str, queue: str, account: str, run_dir: str, value: str, command: list[str]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        sandbox = Sandbox(Path(folder))
        sandbox.launcher("srun")
        try:
            job = Job(
                name=name, queue=queue, account=account, run_dir=run_dir, env={"VALUE": value},
                command=("./run", *command),
            )  # fmt: skip
            text = render(job, load_site("generic_slurm"))
        except RequestError:
            return
        done = sandbox.run(text, **slurm(sandbox, 1))
        assert done.returncode == 0, done.stderr
        assert not list(Path(folder).rglob("canary"))
        assert sandbox.words()[5:] == ["./run", *command]
        assert sandbox.seen()["VALUE"] == value
        directives = [line for line in text.splitlines() if line.startswith("#SBATCH")]
        assert len(directives) == 8 + bool(queue) + bool(account)


@settings(max_examples=60, deadline=None)
@given(name=WORDS, queue=WORDS, account=WORDS)
def test_a_directive_stays_on_one_line(name: str, queue: str, account: str) -> None:
    try:
        text = render(Job(name=name, queue=queue, account=account), load_site("generic_pbs"))
    except RequestError:
        return
    assert f"\n#PBS -N {name}\n" in text
    assert not queue or f"\n#PBS -q {queue}\n" in text
    assert not account or f"\n#PBS -A {account}\n" in text
    assert not set(" \t\r$'\"`;\\") & set(name + queue + account)


@pytest.mark.parametrize("profile", ["generic_pbs", "generic_slurm", "polaris", "perlmutter"])
@pytest.mark.parametrize("bad", ["a b", "a\nb", "a'b", 'a"b', "$(touch x)", "`x`", "a$b", "a;b", "a#b", "-a"])
def test_blanks_quotes_and_dollars_are_refused_in_a_queue(profile: str, bad: str) -> None:
    with pytest.raises(RequestError, match="queue"):
        render(Job(queue=bad), load_site(profile))
