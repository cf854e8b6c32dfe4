"""Checks of PBS scripts: requests that qsub rejects, and pitfalls that PBS does not report."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ddp_hpc.lint.check_registry import Problem, Subject, check, is_one_edit, nearest_known, plain, shown
from ddp_hpc.lint.checks_program_limits import IS_LIGHT
from ddp_hpc.lint.launch_commands import programs, starts
from ddp_hpc.lint.log_directories import created_directories, directory_of, missing_directory
from ddp_hpc.lint.parse_script import Directive
from ddp_hpc.lint.placeholders import has_placeholder
from ddp_hpc.schedulers.registry import SCHEDULERS

# Options of qsub(1B), and -P and -G, which some sites add.
_FLAGS = frozenset("aAcCeGhIJjkKlLmMNoPpqQrRSufvVWXz")
_LETTERS = {"output": "-o", "error": "-e", "name": "-N", "job-name": "-N", "queue": "-q", "account": "-A"}
# Options of Torque's qsub (GETOPT_ARGS in src/cmds/qsub_functions.c of adaptivecomputing/torque).
_OF_TORQUE = frozenset("bdDEFnTtwx")
# Resources of OpenPBS (pbs_resources.7B), and common ones that sites define.
_RESOURCES: list[str] = re.findall(
    r"\S+",
    "arch cput file filesystems host mem mpiprocs ncpus ngpus nice nodect nodes ompthreads pcput place pmem "
    "pvmem select software vmem vnode walltime min_walltime max_walltime soft_walltime",
)
_ELSEWHERE = frozenset(
    re.findall(
        r"\S+",
        "accelerator cgroups cpu_type cpus epilogue feature flags gpu gpu_type gpus gputype gres gpumem "
        "jobfs mics model mppmem mppwidth naccelerators naccesspolicy netloc network nodeset opsys partition "
        "pcmem procs prologue qos queue reqattr scratch size storage tpn trl type var wd",
    )
)
# Resources with and without the flag ATR_DFLAG_CVTSLT in master_resc_def_all.xml of OpenPBS. The server
# rejects the first ones with select (req_quejob.c), and the others in it.
_OF_CHUNKS = (
    *("mem", "ncpus", "ngpus", "mpiprocs", "ompthreads", "vmem"),
    *("host", "vnode", "arch", "hbmem", "nchunk"),
)
# Scripts that use the directory of qsub, and those of NCAR and of brainlife.io, which start there.
_STARTS_ELSEWHERE = re.compile(
    r"(?i:PBS_O_WORKDIR|\bncar|/glade/|\bcasper\b|\bderecho\b|job_priority=|\bbrainlife/|\bjq\b.*\bconfig\.json)|"
    r"@ucar\.edu|#PBS\s+-A\s*(?:[NUSW][A-Z]{3}\d{4}|P\d{8})\b"  # accounts of NCAR
)
# A file of the directory, or below it, that a command reads.
_READS_FILE = re.compile(
    r"(?<![>m])[\s<](?:[A-Za-z][\w-]*[./])*[A-Za-z][\w-]*\.[A-Za-z]\w{0,5}(?<!\.x)(?<!\.exe)(?=[\s;]|$)"
)
# Options with the values that qsub accepts.
_VALUES = {
    "-c": (
        r"(?:[nscwu]|[cw]=\d+|none|enabled|shutdown|periodic|(?:depth|interval|dir)=[^,]+)(?:,[a-z]+(?:=[^,]+)?)*",
        "omit -c, which is about checkpoints, and request CPUs in select",
    ),
    "-j": (r"oe|eo|n", "use -j oe, which joins the logs"),
    "-m": (r"n|[abefjp]+", "use letters without a comma, such as -m abe, and -M for an address"),
    "-r": (r"[yn]", "use -r y or -r n"),
}
# Dependencies (parse_depend_list of OpenPBS), or other attributes.
_DEPENDENCY = r"(?:on:\d+|runone:\S+|(?:after|before)(?:ok|notok|any)?(?::\d[\w.\[\]@-]*(?<!\.))+)"
_ATTRIBUTES = re.compile(
    rf"(?!depend=).*|depend={_DEPENDENCY}(?:,{_DEPENDENCY})*(?:,(?!after|before)[a-z_]+=.*)?", re.DOTALL
)
_OF_JOBS = frozenset(
    ("walltime", "cput", "pcput", "pmem", "pvmem", "place", "nodes", "nice", "file", "filesystems")
)
_OF_CHUNK = re.compile("(?:ncpus|mem|ngpus|mpiprocs|ompthreads|host|vnode|ppn)=")


@check("PBS001", "note", "no shebang")
def _no_shebang(subject: Subject) -> Iterator[Problem]:
    script = subject.script
    if not script.commands or script.lines[0].startswith("#!") or script.value("-S") is not None:
        return
    if not script.read():
        return  # the file may be none for qsub
    before = script.lines[1 : script.commands[0].line - 1]
    late = next((n for n, line in enumerate(before, start=2) if re.match(r"#![ \t]*/", line)), None)
    cause = f"the shebang in line {late} is a comment" if late else "the script has no shebang"
    what = f"{cause}, so PBS runs the script in your login shell, which may not be bash"
    remedy = "move it to line 1" if late else "start the script with #!/bin/bash -l"
    yield Problem(1, what, remedy)


@check("PBS002", "error", "a comment after a directive")
def _trailing_comment(subject: Subject) -> Iterator[Problem]:
    is_rejected = _is_for_openpbs(subject)
    if _is_for_torque(subject):
        return
    for line, text in {d.line: d.text for d in subject.script.read()}.items():
        outside = re.sub(r"\"[^\"]*\"|'[^']*'", "", text)  # a # in quotes belongs to the value
        match = re.search(r"\s#.*", text) if re.search(r"\s#", outside) else None
        if match and not has_placeholder(text):
            comment = f"the comment {shown(match[0].strip())} follows a directive"
            yield Problem(
                line,
                f"{comment}, so qsub rejects the script"
                if is_rejected
                else f"{comment}; Torque ignores it, but OpenPBS and PBS Professional reject the script",
                "move the comment to its own line",
                None if is_rejected else "note",
            )


def _is_for_openpbs(subject: Subject) -> bool:
    """Returns whether the script is for OpenPBS or PBS Professional.

    Torque has neither `select` nor `place`.
    """
    if subject.site is not None and SCHEDULERS[subject.site.scheduler] is subject.scheduler:
        return True
    return subject.uses_chunks


def _options_of_torque(subject: Subject) -> list[Directive]:
    if _is_for_openpbs(subject):
        return []
    return [d for d in subject.script.read() if len(d.flag) == 2 and d.flag[1] in _OF_TORQUE]


def _is_for_torque(subject: Subject) -> bool:
    """Returns whether the script is for Torque, whose users need no advice about OpenPBS."""
    if _is_for_openpbs(subject):
        return False
    names = {name for _, name, _ in subject.script.resources()}
    of_moab = any(d.flag == "-W" and d.value.startswith("x=") for d in subject.script.read())
    is_variable = re.search(r"\bPBS_(?:ARRAYID|NUM_PPN|NUM_NODES|NP|GPUFILE)\b", subject.script.text)
    return bool(_options_of_torque(subject) or of_moab or is_variable or names & {"procs", "gpus"})


@check("PBS003", "error", "an option that qsub does not have")
def _unknown_option(subject: Subject) -> Iterator[Problem]:
    of_torque = _options_of_torque(subject)
    for d in subject.script.read():
        is_known = not d.flag or (not d.flag.startswith("--") and d.flag[1:] in _FLAGS)
        if not is_known and d not in of_torque and not has_placeholder(d.text):
            what = f"{shown(d.flag)} is not a qsub option"
            remedy = "use PBS options, which have one dash and one letter, such as -l select=2; see qsub(1)"
            if d.flag == "-d":
                remedy = f"remove it, and write cd {plain(d.value) or 'DIRECTORY'} in the script"
            if d.flag == "-t":
                remedy = "use -J FIRST-LAST for an array, and PBS_ARRAY_INDEX for the index of a task"
            yield Problem(d.line, what, remedy)


@check("PBS004", "error", "whitespace in the value of a directive")
def _blank_in_value(subject: Subject) -> Iterator[Problem]:
    stray = [d for d in subject.script.read() if not d.flag and not d.value.startswith("#")]
    is_rejected = _is_for_openpbs(subject)
    with_option = {d.line: d.flag for d in subject.script.read() if d.flag}
    for d in {d.line: d for d in reversed(stray)}.values():
        if not has_placeholder(d.text):
            option, remedy = with_option.get(d.line), "join it to the value, without a blank, or remove it"
            is_joined = option != "-l" or d.value[0] in ",:=" or re.search(r"[,:]\s", d.text)
            if d.value[0] in "\u2013\u2014":
                remedy = "write - instead of the dash"
            elif not option or ("=" in d.value and not is_joined):
                remedy = f"write {'-l' if '=' in d.value else '- or its option'} before it"
                if (subject.uses_chunks or d.value.startswith("ppn=")) and _OF_CHUNK.match(d.value):
                    remedy = "write it as a part of select or nodes, after a colon"
                name = d.value.partition("=")[0].strip("-")
                # Not a and I, which may be words of a remark, nor -h, with which the job is held.
                if letter := _LETTERS.get(name, f"-{name}" * (name in _FLAGS - {"a", "h", "I"})):
                    remedy = f"write {letter}" + " and the value" * (letter[1] not in "fVXz")
            resource = re.search(rf"-l\s+(\w+)\s+{re.escape(d.value)}", d.text)
            if resource and re.match(r"\d", d.value):
                remedy = f"write -l {resource[1]}={plain(d.value)}"
            what = f"{shown(d.value)} does not belong to an option"
            what += ", as whitespace ends a value" if option else ""
            if not is_rejected:
                what += "; Torque ignores it, but OpenPBS and PBS Professional reject the script"
            yield Problem(d.line, what, remedy, None if is_rejected else "note")


@check("PBS008", "warning", "a misspelled resource")
def _misspelt_resource(subject: Subject) -> Iterator[Problem]:
    unknown = []
    for option in subject.script.read():
        if len(option.flag) == 2 and option.value.startswith("="):
            what = f"qsub takes = for a part of {shown(option.value)}"
            yield Problem(option.line, what, f"write {option.flag} {plain(option.value[1:])}")
    resources = list(subject.script.resources())
    for d, name, value in resources:
        names = [name]
        if name == "select" and ";" in value:
            yield Problem(d.line, f"{shown(value)} contains a semicolon", "write a colon or a comma", "error")
        if name == "gpus" or re.search(r":gpus=", value if name == "select" else ""):
            what = "OpenPBS has no resource gpus, unless the site defines it"
            yield Problem(
                d.line, what, "write ngpus in a chunk of select, or :gpus= after ppn in Torque", "note"
            )
        if name == "ppn":
            what = "ppn is a part of nodes, not a resource"
            # The qsub of some sites joins both.
            is_apart = any(other == "nodes" and ":" not in number for _, other, number in resources)
            form = "select=NUMBER:ncpus" if subject.uses_chunks else "nodes=NUMBER:ppn"
            remedy = f"write -l {form}={plain(value)}"
            yield Problem(d.line, what, remedy, "note" if is_apart else None)
            continue
        for part in value.split(":")[1:] if name == "nodes" else ():
            if re.match(r"(?:mem|pmem|vmem|walltime)=", part):
                what = f"{shown(part)} is not a property of nodes, so qsub rejects it"
                yield Problem(d.line, what, f"request it separately: -l {plain(part)}", "error")
        if name == "select":
            names += [part.partition("=")[0] for part in value.split(":")[1:] if "=" in part]
        unknown += [(d.line, w) for w in names if w and w not in _RESOURCES and w not in _ELSEWHERE]
    for line, word in unknown:
        # A program may fill it in, or a backslash continue it in the next line.
        if re.search(r"[^\w.@-]", word) and not (has_placeholder(word) or re.search(r"[$\\]", word)):
            has_colon = word.partition(":")[0] in _RESOURCES
            remedy = "write = for the first :" if has_colon else "write NAME=VALUE, such as walltime=1:00:00"
            yield Problem(line, f"{shown(word)} is not a resource, so qsub rejects it", remedy, "error")
    nearest = nearest_known((word for _, word in unknown), _RESOURCES, cutoff=0.8) | {
        "ppn": "ncpus and mpiprocs"
    }
    for line, word in unknown:
        near = nearest.get(word)
        if near and (is_one_edit(word, near) or (word == "ppn" and _is_for_openpbs(subject))):
            yield Problem(line, f"{shown(word)} is not a resource of PBS itself", f"did you mean {near}?")


@check("PBS011", "warning", "a log directory that does not exist")
def _no_log_directory(subject: Subject) -> Iterator[Problem]:
    script = subject.script
    # Some sites always set -k doe. Without it, PBS copies the logs at the end of the job.
    is_early = subject.known_site is not None or "d" in (script.value("-k") or "")
    created = {} if is_early else created_directories(script)
    for d in script.read():
        path = d.value.rpartition(":")[2] if d.flag in ("-o", "-e") else ""
        directory = missing_directory(path, subject.directory)
        if directory and directory_of(path) not in created:
            then = "with -k doe PBS holds the job" if is_early else "PBS cannot copy the log to it"
            what = f"the log directory {shown(directory)} does not exist, so {then}"
            remedy = f"create it before submitting: mkdir -p {shown(directory)}"
            yield Problem(d.line, what, remedy, None if is_early else "note")


@check("PBS012", "warning", "nodes counted as lines of PBS_NODEFILE")
def _nodefile_lines(subject: Subject) -> Iterator[Problem]:
    if (subject.ranks_per_node or 1) < 2:
        return
    script = subject.script
    for line, name, value in script.assignments:
        if (
            re.search(r"\$\{?(?:PBS_)?NODEFILE\b", value)
            and re.search(r"\bwc\b", value)
            and not re.search(r"\bsort\b|\buniq\b|\bawk\b", value)
            and re.search("node|host", name, re.IGNORECASE)
            and not re.search("size|len|lines|file|procs", name, re.IGNORECASE)
            # One rank for each line, or a number that is divided by the lines of a node.
            and not re.search(rf"\s-np?[ =]\"?\$\{{?{name}\b(?!.*-(?:ppn|N|npernode)\b)", script.text)
            and not re.search(rf"(?:\blet |\bexpr |\(\(|\becho )[^\n]{{,200}}\b{name}\}}? *\/", script.text)
        ):
            what = (
                f"{name} counts lines, but PBS_NODEFILE has {subject.ranks_per_node} lines per node "
                "(mpiprocs)"
            )
            yield Problem(line, what, f'use {name}=$(sort -u "$PBS_NODEFILE" | wc -l)')


@check("PBS014", "note", "the long TMPDIR that PBS sets")
def _long_tmpdir(subject: Subject) -> Iterator[Problem]:
    script = subject.script
    # Scripts that start the supervisor are not affected, since it shortens TMPDIR.
    if script.supervised or script.sets("TMPDIR"):
        return
    for start, name, source in programs(subject):
        if imported := source.files.packages_elsewhere & {"torch", "multiprocessing"}:
            what = (
                f"{name} imports {min(imported)}, and PBS sets a long TMPDIR, so with a long job ID, worker "
                'processes can fail with "AF_UNIX path too long"'
            )
            yield Problem(start.command.line, what, "add export TMPDIR=/tmp")
            return


@check("PBS015", "note", "the script runs in the home directory")
def _stays_at_home(subject: Subject) -> Iterator[Problem]:
    script = subject.script
    moves = _STARTS_ELSEWHERE.search(script.text) or any(
        command.name in ("cd", "pushd") for command in script.commands
    )
    in_place = any(name == "wd" for _, name, _ in script.resources()) or script.value("-d", "-w") is not None
    # An interactive job runs no command of the script.
    if moves or in_place or script.value("-I") is not None:
        return
    remedy = 'add cd "$PBS_O_WORKDIR"'
    if line := _line_of_relative_program(subject):
        yield Problem(line, "PBS starts a job in the home directory, not where qsub was called", remedy)
        return
    for start in (one for one in starts(subject) if not IS_LIGHT.fullmatch(one.program)):
        if (
            start.command.name != "pbsdsh"
            and not re.search("['\"]", start.command.text)
            and (file := _READS_FILE.search(start.command.text.partition(start.words[0])[2]))
        ):
            what = f"PBS starts a job in the home directory, so it looks for {shown(file[0][1:])} there"
            yield Problem(start.command.line, what, remedy)
            return


def _line_of_relative_program(subject: Subject) -> int | None:
    """Returns the number of the first line that starts a file of Python or a program of this directory."""
    # The tasks of pbsdsh start in the home directory in any case.
    for command in (one for one in subject.script.commands if one.name != "pbsdsh"):
        if any(re.fullmatch(r"\./[^/]+", word) for word in (command.launched or command.argv)[:1]):
            return command.line
        if any(re.fullmatch(r"[^/$~-].*\.py", word) for word in command.argv[:40]) and any(
            re.fullmatch(r"(?:.*/)?python[0-9.]*|torchrun", word) for word in command.argv[:40]
        ):
            return command.line
    return None


@check("PBS022", "error", "a resource that belongs into select, or not")
def _select_and_job(subject: Subject) -> Iterator[Problem]:
    for d, name, value in subject.script.resources():
        if name == "select":
            for chunk in value.split("+"):
                given = [part.partition("=")[0] for part in chunk.split(":") if "=" in part]
                for inside in {name for name in given if given.count(name) > 1}:
                    yield Problem(d.line, f"PBS rejects {inside} twice in a chunk", "remove one of them")
            for part in re.findall(r":([^:+=$]*\w)(?=[:+]|$)", value) if "=" in value or ":" in value else ():
                yield Problem(
                    d.line, f"{shown(part)} in select is not NAME=VALUE", "write NAME=VALUE, such as ncpus=4"
                )
            for part in re.split("[:+]", value):
                if (inside := part.partition("=")[0]) in _OF_JOBS and "=" in part:
                    what = f"{inside} is a resource of the job, so PBS rejects it in select"
                    yield Problem(d.line, what, f"request it separately: -l {shown(part)[1:-1]}")
        elif name in ("nodes", *_OF_CHUNKS) and subject.uses_chunks:
            # A hook of NCI, whose jobs have these resources, writes others into select.
            of_nci = {"jobfs", "storage", "wd", "other"} & {one for _, one, _ in subject.script.resources()}
            may_be_written = name != "nodes" and bool(of_nci)
            yield Problem(
                d.line,
                f"-l {name} cannot be used with select or place, so PBS rejects the script",
                "write its numbers in select instead: select=NODES:ncpus=PPN"
                if name == "nodes"
                else f"write it in select instead: select=NUMBER:{name}={shown(value)[1:-1]}",
                "note" if may_be_written else None,
            )


@check("PBS023", "error", "a value that qsub rejects")
def _rejected_value(subject: Subject) -> Iterator[Problem]:
    for d in subject.script.read():
        array = re.fullmatch(r"(\d+)-(\d+)(?::\d+)?(?:%\d+)?", d.value)
        is_value = not has_placeholder(d.text) and not re.search(r"[${]|%\(|[A-Z]{4}", d.value)
        is_name = d.flag == "-N" and is_value and _is_for_openpbs(subject)
        if is_name and not re.fullmatch(r"[\w.+-]+", d.value, re.ASCII):
            what = f"qsub rejects the name {shown(d.value)}"
            yield Problem(d.line, what, "use letters, digits and - _ + .", is_to_fill_in=not d.value)
        elif d.flag == "-W" and is_value and _is_for_openpbs(subject) and not _ATTRIBUTES.fullmatch(d.value):
            what = f"OpenPBS rejects the dependency {shown(d.value)}"
            name = re.search(r":([A-Za-z_]+)$", d.value)  # such as jobid
            remedy = "write depend=TYPE:ID[:ID...], with a type of qsub(1B), such as afterok"
            if name and _ATTRIBUTES.fullmatch(f"{d.value[: name.start(1)]}1"):
                remedy = f"replace {plain(name[1])} with the ID of a job"
            yield Problem(d.line, what, remedy, is_to_fill_in=name is not None)
        elif d.flag == "-J" and is_value and not (array and int(array[1]) < int(array[2])):
            what = f"qsub rejects the range {shown(d.value)}"
            is_to_fill_in = re.fullmatch(r"\d+-[A-Za-z]\w*", d.value) is not None
            remedy = "use FIRST-LAST with a larger LAST, such as -J 1-10"
            yield Problem(d.line, what, remedy, is_to_fill_in=is_to_fill_in)
        for values, remedy in [_VALUES[d.flag]] if d.flag in _VALUES and d.value and is_value else []:
            if not re.fullmatch(values, d.value):
                is_of_nqsv = (d.flag, d.value) == ("-j", "o")
                what = (
                    f"qsub has no value {shown(d.value)} for {d.flag}" + ", except that of NQSV" * is_of_nqsv
                )
                if d.flag == "-j" and re.fullmatch(r"\d+-\d+.*", d.value):
                    remedy = f"write -J {plain(d.value)} for an array"
                yield Problem(d.line, what, remedy, "note" if is_of_nqsv else None)


@check("PBS024", "note", "a log that PBS does not write to the path, or overwrites")
def _kept_log(subject: Subject) -> Iterator[Problem]:
    kept = subject.script.value("-k") or ""
    array = re.fullmatch(r"(\d+)-(\d+)(?::(\d+))?(?:%.*)?", subject.script.value("-J") or "")
    has_several = array is not None and int(array[2]) - int(array[1]) >= int(array[3] or 1)
    for d in subject.script.read() if has_several else ():
        if d.flag in ("-o", "-e") and re.fullmatch(r"[^$^{<]+\.\w+", d.value) and d.value != "/dev/null":
            what = f"all subjobs of the array write to {shown(d.value)}, and only the last log remains"
            yield Problem(d.line, what, "write ^array_index^ into the name, or only the directory")
            break
    log, errors = (subject.script.value(flag) or "" for flag in ("-o", "-e"))
    is_joined = subject.script.value("-j") in ("oe", "eo") or kept
    if log == errors and re.search(r"\.(?:o|e|out|err|log|txt)\w*$", log) and not is_joined:
        what = f"-o and -e name the same file, {shown(log)}, and one overwrites the other"
        yield Problem(subject.line_of("-e"), what, "write -j oe instead of -e")
    for d in subject.script.read() if re.fullmatch("[oe]{1,2}", kept) else ():
        if d.flag in ("-o", "-e") and d.flag[1] in kept and "/" in d.value:
            what = f"with -k {kept}, PBS keeps the log in the home directory, and ignores {d.flag}"
            yield Problem(d.line, what, "remove -k")
