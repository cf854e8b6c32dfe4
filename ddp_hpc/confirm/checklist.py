"""The script that asks a machine for the facts of its profile. Users read it before they run it."""

from __future__ import annotations

from ddp_hpc.base.errors import RequestError
from ddp_hpc.base.units import parse_walltime_s
from ddp_hpc.render.render_script import render
from ddp_hpc.render.shell_quoting import sh, sh_join
from ddp_hpc.request.job import Job
from ddp_hpc.schedulers.machine_facts import Question
from ddp_hpc.schedulers.registry import scheduler_of_site
from ddp_hpc.sites.site import Site

LIMIT_S = 60
MARK = "== "
FAILED = "-- exit code "
FIRST, LAST = "ddp-hpc answers 1", "end"
SOFTWARE, PYTHON, LAUNCHERS = "software", "python", "launchers"
RANK_COMMAND = ("python", "-m", "ddp_hpc", "env", "--json", "--devices")
_WALLTIME = "00:05:00"

_HEAD = """\
#!/bin/bash
# Asks this machine for the facts in profile {name} of ddp-hpc. Run it on a login node:
#   bash confirm.sh >answers.txt
# All commands only read, and each has {limit_s} seconds. The whole script takes about a minute.

ask() {{ # ask KEY COMMAND: prints the output of the command, and its exit code if it fails
  echo "{mark}$1"
  timeout {limit_s} "${{@:2}}" 2>&1 || echo "{failed}$?"
}}

echo {first}
"""
_SOFTWARE = """\
# The software of the profile as job scripts load it, Python and torch, and the launchers on the PATH.
ask {software} {shell} <<'END'
trap 'echo "{failed}$? of $BASH_COMMAND"' ERR
{lines}
trap - ERR
echo "{mark}{python}"
python --version
python -c 'from importlib.metadata import version; print("torch", version("torch"))'
echo "{mark}{launchers}"
for launcher in {names}; do
  echo "launcher $launcher $(command -v "$launcher")"
  timeout 20 "$launcher" --version </dev/null 2>&1 | head -n 4
done
END
"""
_TAIL = """\
echo "{mark}{last}"
cat >&2 <<'END'
The first half is done. The second half is a job of a few minutes, which shows what each rank sees:
  {submit}
When the job has ended, append its log to the answers, and compare them with the profile:
  ddp-hpc logs JOBID >>answers.txt
  ddp-hpc profiles confirm {name} answers.txt
END
"""


def checklist(site: Site, name: str) -> str:
    """Returns the script for a profile; `name` is how the user named the profile.

    Raises:
        RequestError: the scheduler of the profile cannot be asked.
    """
    scheduler = scheduler_of_site(site)
    questions = scheduler.commands.questions()
    if not questions:
        raise RequestError(
            f"the scheduler of profile {site.name} is {site.scheduler}, but only profiles with slurm or pbs "
            "can be confirmed in this way. Check the facts by hand."
        )
    parts = [
        _HEAD.format(
            name=site.name,
            limit_s=LIMIT_S,
            mark=MARK,
            failed=FAILED,
            first=sh(f"{MARK}{first_line(site)}"),
        )
    ]
    parts += [_ask(question) for question in questions]
    parts.append(_software(site, scheduler.writer.launchers))
    parts.append(_TAIL.format(mark=MARK, last=LAST, submit=sh_join(job_command(site, name)), name=sh(name)))
    return "\n".join(parts)


def first_line(site: Site) -> str:
    """Returns the line with which the answers for a profile begin, after `MARK`."""
    return f"{FIRST} {site.name} {site.scheduler}"


def job_command(site: Site, name: str) -> list[str]:
    """Returns the command that submits the job: on two nodes, or on one if no queue takes two."""
    account = f"{site.account.prefix}PROJECT{site.account.suffix}" if site.account.required else ""
    num_nodes = 2
    try:
        render(Job(num_nodes=2, walltime_s=parse_walltime_s(_WALLTIME), account=account), site)
    except RequestError:
        num_nodes = 1
    words = ["ddp-hpc", "submit", "--profile", name, "--nodes", str(num_nodes), "--walltime", _WALLTIME]
    if account:
        words += ["--account", account]
    if not (site.node.devices or site.node.device or site.node.cpu_only):
        words += ["--gpus-per-node", "N"]
    return [*words, "--name", "confirm", "--", *RANK_COMMAND]


def _ask(question: Question) -> str:
    is_script = "\n" in question.command
    words = f"bash <<'END'\n{question.command}\nEND" if is_script else question.command
    return f"# {question.answers[0].upper()}{question.answers[1:]}.\nask {question.key} {words}\n"


def _software(site: Site, launchers: tuple[str, ...]) -> str:
    return _SOFTWARE.format(
        software=SOFTWARE,
        shell=site.shell,
        failed=FAILED,
        lines="\n".join(site.software) or "true",
        mark=MARK,
        python=PYTHON,
        launchers=LAUNCHERS,
        names=" ".join(name for name in launchers if name != "torchrun"),
    )
