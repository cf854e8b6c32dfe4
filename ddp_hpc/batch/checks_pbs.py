"""Checks of PBS scripts: what qsub refuses, what PBS does to scripts, and what it never says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path

from ddp_hpc.batch.checks_registry import Seen, Subject, check, shown
from ddp_hpc.batch.schedulers import PBS_MAX_NAME_CHARS

_FLAGS = frozenset("aAcCeGhIJjkKlLmMNoPpqQrRSufvVWXz")  # qsub.1B, and -P and -G of sites' own builds
_RESOURCES: list[str] = re.findall(
    r"\S+",
    "accelerator arch cput exclhost file filesystems gpu_type group host jobfs max_walltime mem "
    "min_walltime model mpiprocs mps naccelerators ncpus ngpus nice nodes ompthreads pcput "
    "place pmem ppn pvmem select soft_walltime software storage system vmem vnode walltime wd "
    "job_priority ",
)
_PLACE = re.compile(r"(?:free|pack|scatter|vscatter)?(?::?(?:excl|exclhost|shared|group=[\w-]+))*")
_OF_A_CHUNK = ("ncpus", "mpiprocs", "ngpus", "mem", "ompthreads")
_VALUES = {"-j": r"oe|eo|n", "-k": r"n|[doe]+", "-r": r"[yn]", "-m": r"n|[abej]+"}
_LONGEST_NAME = 230


@check("PBS001", "warning", "no shebang")
def _no_shebang(subject: Subject) -> Iterator[Seen]:
    if not subject.script.lines[0].startswith("#!"):
        yield Seen(
            1, "the script names no shell, so PBS runs it in your login shell", "begin with #!/bin/bash -l"
        )


@check("PBS002", "error", "a comment behind a directive")
def _trailing_comment(subject: Subject) -> Iterator[Seen]:
    for line, text in {d.line: d.text for d in subject.script.read()}.items():
        if match := re.search(r"\s#.*", text):
            yield Seen(
                line,
                f"{shown(match[0].strip())} stands behind a directive, and qsub refuses the script",
                "put the comment on a line of its own",
            )


@check("PBS003", "error", "an option that qsub does not have")
def _unknown_option(subject: Subject) -> Iterator[Seen]:
    for d in subject.script.read():
        if d.flag and (d.flag.startswith("--") or d.flag[1:] not in _FLAGS):
            yield Seen(
                d.line,
                f"{shown(d.flag)} is no option of qsub",
                "options of PBS have one dash and one letter, such as -l select=2; see qsub(1)",
            )


@check("PBS004", "error", "a blank in a directive's value")
def _blank_in_value(subject: Subject) -> Iterator[Seen]:
    for d in subject.script.read():
        if not d.flag and not d.value.startswith("#"):
            yield Seen(
                d.line,
                f"{shown(d.value)} belongs to no option; qsub ends a value at a blank, after a comma too",
                "take the blank out",
            )


@check("PBS005", "error", "select beside resources of a chunk")
def _select_and_chunk(subject: Subject) -> Iterator[Seen]:
    found = {name: d.line for d, name, _ in subject.script.resources()}
    if "select" in found:
        for name in _OF_A_CHUNK:
            if name in found:
                yield Seen(
                    found[name],
                    f"-l {name}= stands beside -l select=, and qsub refuses the two together",
                    f"put it into the chunk: select=N:{name}=...",
                )


@check("PBS006", "error", "a job name that qsub refuses")
def _illegal_name(subject: Subject) -> Iterator[Seen]:
    name = subject.script.value("-N") or ""
    if len(name) > _LONGEST_NAME or re.search(r"[\s$]", name):
        yield Seen(
            subject.line_of("-N"),
            f"job name {shown(name)} is one that qsub refuses",
            f"use letters, digits, _ and -, {PBS_MAX_NAME_CHARS} characters at most",
        )


@check("PBS007", "warning", "a job name longer than 15 characters")
def _long_name(subject: Subject) -> Iterator[Seen]:
    name = subject.script.value("-N") or ""
    if PBS_MAX_NAME_CHARS < len(name) <= _LONGEST_NAME:
        yield Seen(
            subject.line_of("-N"),
            f"job name {shown(name)} has {len(name)} characters; older servers cut or refuse more than 15",
            "shorten it",
        )


@check("PBS008", "error", "a misspelt resource")
def _misspelt_resource(subject: Subject) -> Iterator[Seen]:
    for d, name, value in subject.script.resources():
        names = [name]
        if name == "select":
            names += [part.partition("=")[0] for part in value.split(":")[1:] if "=" in part]
        for word in names:
            if word and word not in _RESOURCES:
                for near in get_close_matches(word[:80], _RESOURCES, n=1, cutoff=0.8):
                    yield Seen(d.line, f"resource {shown(word)} is not known to PBS", f"did you mean {near}?")


@check("PBS009", "error", "a place that PBS does not know")
def _illegal_place(subject: Subject) -> Iterator[Seen]:
    for d, name, value in subject.script.resources():
        if name == "place" and not (value and _PLACE.fullmatch(value)):
            yield Seen(
                d.line,
                f"place={shown(value)} is refused",
                "use free, pack, scatter or vscatter, then :excl or :exclhost",
            )


@check("PBS010", "error", "a value that the option does not take")
def _illegal_value(subject: Subject) -> Iterator[Seen]:
    for d in subject.script.read():
        if d.flag in _VALUES and not re.fullmatch(_VALUES[d.flag], d.value):
            yield Seen(d.line, f"{d.flag} {shown(d.value)} is refused", f"qsub takes {_VALUES[d.flag]} there")


@check("PBS011", "warning", "a log folder that does not exist")
def _no_log_folder(subject: Subject) -> Iterator[Seen]:
    for d in subject.script.read():
        path = d.value.rpartition(":")[2]
        if d.flag not in ("-o", "-e") or not path or re.search(r"[$~\0^]", path) or len(path) > 1000:
            continue
        folder = Path(path) if path.endswith("/") else Path(path).parent
        try:
            there = folder.is_dir()
        except OSError:  # a folder above it may not be read, or a name is too long
            continue
        if not there:
            yield Seen(
                d.line,
                f"the folder {shown(str(folder))} is not there; under -k doe PBS holds the job",
                f"make it before qsub: mkdir -p {shown(str(folder))}",
            )


@check("PBS012", "warning", "nodes counted by the lines of PBS_NODEFILE")
def _nodefile_lines(subject: Subject) -> Iterator[Seen]:
    if (subject.ranks_per_node or 1) < 2:
        return
    for line, name, value in subject.script.assignments:
        if (
            re.search("NODEFILE", value)
            and re.search(r"\bwc\b", value)
            and not re.search(r"\bsort\b|\buniq\b|\bawk\b", value)
            and re.search("node|host", name, re.IGNORECASE)
        ):
            yield Seen(
                line,
                f"{name} counts lines; PBS_NODEFILE has {subject.ranks_per_node} a node (mpiprocs)",
                f'{name}=$(sort -u "$PBS_NODEFILE" | wc -l)',
            )


@check("PBS013", "warning", "a chain by afterok")
def _afterok(subject: Subject) -> Iterator[Seen]:
    found = [(d.line, d.value) for d in subject.script.read() if d.flag == "-W"]
    found += [(c.line, c.text) for c in subject.script.commands if "qsub" in c.text]
    for line, text in found:
        if re.search(r"depend=[^\s]{0,200}?afterok", text):
            yield Seen(
                line,
                "afterok: after a job killed at its walltime the next one is deleted; after an array "
                "it starts whatever failed",
                "use afterany, and let the job look at the run's state before it begins",
            )


@check("PBS014", "note", "TMPDIR is PBS's long one")
def _long_tmpdir(subject: Subject) -> Iterator[Seen]:
    if not subject.script.sets("TMPDIR") and (line := _python_line(subject)):
        yield Seen(
            line,
            "TMPDIR is left as PBS sets it; with a long job id workers of a DataLoader fail with "
            '"AF_UNIX path too long"',
            "export TMPDIR=/tmp",
        )


@check("PBS015", "warning", "the script stays in the home folder")
def _stays_at_home(subject: Subject) -> Iterator[Seen]:
    script = subject.script
    moves = "PBS_O_WORKDIR" in script.text or any(
        command.name in ("cd", "pushd") for command in script.commands
    )
    in_place = any(name == "wd" for _, name, _ in script.resources())
    if not moves and not in_place and (line := _python_line(subject)):
        yield Seen(
            line, "PBS starts a job in the home folder, not where qsub was called", 'cd "$PBS_O_WORKDIR"'
        )


def _python_line(subject: Subject) -> int | None:
    """Where the body starts Python, by a launcher or by itself."""
    for command in subject.script.commands:
        if any(re.fullmatch(r"(?:.*/)?python[0-9.]*|torchrun|[^$]*\.py", word) for word in command.argv[:40]):
            return command.line
    return None


@check("PBS016", "warning", "the script looks for its own folder")
def _own_folder(subject: Subject) -> Iterator[Seen]:
    for number, line in enumerate(subject.script.lines, start=1):
        if (
            "dirname" in line
            and not line.lstrip().startswith("#")
            and re.search(r"\$0\b|\$\{0\}|BASH_SOURCE", line)
        ):
            yield Seen(
                number,
                "PBS runs a copy of the script out of its spool folder, so $0 does not lead to your files",
                "use $PBS_O_WORKDIR",
            )


@check("PBS017", "error", "an array that is not rerunnable")
def _array_not_rerunnable(subject: Subject) -> Iterator[Seen]:
    if subject.script.value("-J") is not None and subject.script.value("-r") == "n":
        yield Seen(subject.line_of("-r"), "-r n stands beside -J; qsub refuses such an array", "leave -r out")


@check("PBS018", "warning", "-V hands the whole environment on")
def _whole_environment(subject: Subject) -> Iterator[Seen]:
    if subject.script.value("-V") is not None:
        yield Seen(
            subject.line_of("-V"),
            "-V hands all variables of the login shell to the job: modules mix, and qstat -F json may break",
            "load what the job needs in the script; hand single variables on with -v NAME=VALUE",
        )


@check("PBS019", "warning", "OMP_NUM_THREADS is left to PBS")
def _threads_of_the_chunk(subject: Subject) -> Iterator[Seen]:
    script = subject.script
    if "OMP_NUM_THREADS" in script.text:
        return
    for command in script.launches():
        per_node = command.option("--ppn", "-ppn")
        if command.name in ("mpiexec", "mpirun") and per_node != "1" and (per_node or subject.ranks_per_node):
            yield Seen(
                command.line,
                "PBS sets OMP_NUM_THREADS to the cores of the whole chunk, and each rank uses it",
                "export OMP_NUM_THREADS=CORES_A_RANK, or mpiexec --env OMP_NUM_THREADS=...",
            )
            return
