"""Checks of the options in #SBATCH lines that sbatch rejects, or reads differently from what was intended."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

from ddp_hpc.lint.check_registry import Problem, Severity, Subject, check, nearest_known, plain, shown
from ddp_hpc.lint.files_beside import is_part_of_others
from ddp_hpc.lint.log_directories import created_directories, directory_of, exists_near, missing_directory
from ddp_hpc.lint.long_options import long_name, with_two_dashes
from ddp_hpc.lint.parse_script import Directive
from ddp_hpc.lint.placeholders import stands_for_value
from ddp_hpc.schedulers.slurm.check_option_values import expected_value, rejecting_versions
from ddp_hpc.schedulers.slurm.contradictions import Contradiction, contradictions
from ddp_hpc.schedulers.slurm.sbatch_options import CURRENT, OPTIONS, SRUN_OPTIONS, VERSIONS, find_option
from ddp_hpc.schedulers.versions import is_between

_REJECT = "and later versions reject it"
_OF_SRUN = "move it to the srun line, or remove it if there is none"
_GIVE = "give it a value, or remove it"
_OTHER = "use an option of sbatch(1), or remove it"
_ONE_DASH = "write -{}, with one dash and without ="
_LETTERS = frozenset(option.letter for option in OPTIONS.values() if option.letter)
# Options whose values are left to the user.
_OFTEN_EMPTY = frozenset(
    f"--{of}"
    for of in ["account", "partition", "mail-user", "job-name", "output", "error", "qos", "reservation"]
)
# Descriptions of a value, such as ACCOUNT HERE and directory path.
_DESCRIPTION = re.compile(
    r"\b(?:[A-Z_]{3,}|directory|file|your|the|account|partition|project|e?mail) (?i:here|path|name)\b"
    r"|\bto (?:be )?define"
)
# Words for a number of nodes: other words after -N may be the name of the job.
_OF_NODES = re.compile(r"(?i:(?:n|num|number|total)?_?(?:of_)?nodes?(?:_num|_number)?)|[NX]{2,}")
# The letters of the #BSUB and #PBS options that sbatch translates (Slurm 22.05, src/sbatch/xlate.c).
_BSUB_LINE = re.compile(r"#BSUB[ \t]+(.*)")
_BSUB_OF_SBATCH = "ceJmMnoqWx"
_PBS_OF_SBATCH = "aAcCehIjJklmMNopqrStuvVWz"
# Options that plugins add to sbatch, with the place where they are documented: Shifter (NERSC), Pyxis
# (NVIDIA), uenv and the container engine (CSCS), EAR (BSC), FPGAs (Paderborn), and job monitoring (CINES,
# TU Dresden).
OF_PLUGINS = re.compile(
    r"image|module|volume|entrypoint|environment|uenv|uenv-.*|view|repo|(?:no-)?container-.*|ear|ear-.*|fpgalink|setattr|"
    r"licence|gpu-accounting|perf|ccm|squash|bind|nv-meta|x11|gpufreq"
)
# Options that come from plugins of few sites, such as Shanghai AI Laboratory (quotatype), the Ohio
# Supercomputer Center (gpu_cmode), the Hebrew University (killable), Kyoto University (rsc), RWTH Aachen
# (beeond), Juelich (perfparanoid, cuda-mps), DKRZ (monitoring), GSI (singularity) and NERSC (zonesort,
# vtune), and from that of CEA for Kerberos (auks). Elsewhere, sbatch rejects them.
_OF_FEW_SITES = re.compile(
    r"quotatype|gpu_cmode|gpu-mps|no-step-tmpdir|killable|rsc|auks|beeond|cuda-mps|monitoring|singularity-.*|"
    r"(?:disable|enable)-(?:perfparanoid|turbo(?:mode)?|xserver|dcgm)|zonesort|vtune|gmem"
)
_INSTEAD = {
    "--mem-per-task": "--mem-per-cpu with this value divided by --cpus-per-task",
}
_INSTEAD |= re.findall(
    r"(\S+) (\S+)",
    "--name --job-name  --email --mail-user  --email-user --mail-user  --memory --mem  --walltime --time  "
    "--include --nodelist  --core-per-task --cpus-per-task  --cores-per-task --cpus-per-task  "
    "--share --oversubscribe  --queue --partition  --workdir --chdir  --mem_bind --mem-bind",
)
# An option that sbatch takes as the value of the option before it.
_TAKEN = re.compile("--?[A-Za-z]")
_NAMED = frozenset(("--partition", "--account", "--qos", "--constraint", "--nodelist", "--reservation"))
# With any value of these options, the job can run.
_NAMES_OF_JOBS = ("--job-name", "--output", "--error", "--input")
# Options in which JOB008 reports a variable; the value of the others may be a text that contains one.
_WITHOUT_TEXT = ("--array", "--nodes", "--ntasks", "--cpus-per-task", "--mem", "--time")
_TAKES_NUMBER = re.compile("--(?:nodes$|ntasks|cpus-per|mem$|mem-per|array|gpus|dependency)")
# The beginning of a script, and of a first line that should be one.
_BEGINS = re.compile(r"#!|#SBATCH\b")
_DAMAGED = re.compile(
    r"(.{1,3}#!)|(!\s*/|#?\s*/(?:usr/(?:local/)?)?bin/(?:env +)?\w*sh(?: +-\w+)*\s*$)|[A-Z]*BATCH\b"
)
_MOST_BEFORE = 5


# What sbatch reads as the value of `--name= value` and `--name = value`.
_CUT = ("", "=")
_AS_ONE = "write the option as --NAME=VALUE"


def _options(subject: Subject) -> Iterator[Directive]:
    """Yields the options that sbatch reads, without those that contain a placeholder of a template."""
    cut = 0  # the line of an option that ends at a blank in $( ), whose other words JOB008 explains
    for d in subject.script.read():
        if d.line not in subject.placeholder_lines and d.line != cut:
            yield d
        if d.flag in _WITHOUT_TEXT and "$(" in d.value and ")" not in d.value.rpartition("$(")[2]:
            cut = d.line


@check("SLURM001", "error", "no shebang")
def _no_shebang(subject: Subject) -> Iterator[Problem]:
    script = subject.script
    if script.lines[0].startswith("#!"):
        return
    shebangs = [
        n
        for n, line in enumerate(script.lines, 1)
        if re.match(r"\W{0,3}#![ \t]*/", line) and not script.is_quoted(n)
    ]
    late = [n for n in shebangs if n <= 5]
    what = f"the shebang is in line {late[0]} instead of line 1" if late else "line 1 is not a shebang"
    remedy = f"move line {shebangs[0]} to line 1" if shebangs else "insert #!/bin/bash as line 1"
    if re.search(r"\w#!/", script.lines[0]):
        remedy = "write only #!/bin/bash in line 1"
    before = [c for c in script.commands if shebangs and c.line < shebangs[0]]
    if before:
        remedy += ", and the commands before it below the directives"
    if script.lines[0].startswith("<<<<<<<"):
        what = "line 1 is a conflict marker of git instead of the shebang"
        remedy = "resolve the merge conflict"
    damaged = _DAMAGED.match(script.lines[0])
    if damaged and damaged[1]:
        what, remedy = "there are other characters before #!", "remove what comes before #!"
    elif damaged and damaged[2]:
        what, remedy = "line 1 does not begin with #!", "write #! at its beginning, without blanks"
    elif damaged:
        remedy += ", and write #SBATCH into the next line"
    # Several of them, and directives below other lines, are in notes with examples.
    begins = next((n for n, line in enumerate(script.lines, 1) if _BEGINS.match(line)), 1)
    num_before = sum(bool(line.strip()) for line in script.lines[: begins - 1])
    are_notes = num_before > _MOST_BEFORE and (len(shebangs) > 1 or not script.read())
    are_notes |= any(c.name == "exit" for c in before)  # which disables the script
    # Another program writes the shebang before a header.
    is_header = all(
        c.name in ("", "cd", "module") and not re.search(r"\$\(|`", c.text) for c in script.commands
    )
    severity: Severity | None = "note" if are_notes or is_part_of_others(subject.path) else None
    yield Problem(1, f"{what}, so sbatch rejects the script", remedy, severity, is_header)


@check("SLURM002", "error", "an option that sbatch does not have")
def _unknown_option(subject: Subject) -> Iterator[Problem]:
    unknown = [d for d in _options(subject) if d.fault == "unknown"]
    flags = (d.flag for d in unknown if d.flag[:2] == "--")
    long = {flag: long_name(flag) for flag in flags}
    nearest = nearest_known(long.values(), CURRENT, cutoff=0.75)
    for d in unknown:
        name, near = d.flag[2:], nearest.get(long.get(d.flag, ""), "")
        if name in SRUN_OPTIONS:
            yield Problem(d.line, f"{shown(d.flag)} is an option of srun, not of sbatch", _OF_SRUN)
        elif not d.flag.startswith("--"):
            yield Problem(d.line, *_wrong_letter(d))
        elif instead := _INSTEAD.get(d.flag):
            yield Problem(d.line, f"{shown(d.flag)} is not an sbatch option", f"use {instead}")
        elif not OF_PLUGINS.fullmatch(name):
            is_of_few_sites = _OF_FEW_SITES.fullmatch(name)
            what = f"{shown(d.flag)} is not an sbatch option, unless a plugin of the site adds it"
            is_near = near and not is_of_few_sites
            if near == "mem-per-gpu" and "g" not in name:
                near = "mem-per-cpu"
            remedy = f"did you mean --{near}?" if is_near else _OTHER
            if name in _LETTERS:
                remedy = _ONE_DASH.format(name)
            elif is_near and (value := d.written.partition(":")[2]):  # such as --gres:gpu=1
                remedy = f"write --{near}={plain(value.replace('=', ':') if near == 'gres' else value)}"
            yield Problem(d.line, what, remedy, "note" if is_of_few_sites else None)


def _wrong_letter(d: Directive) -> tuple[str, str]:
    if remedy := with_two_dashes(d):
        return f"sbatch reads {shown(d.written)} as several one-letter options", remedy
    inside = f" (in {shown(d.written)})" * (d.written != d.flag)
    return f"sbatch has no option {plain(d.flag)}{inside}", _OTHER


def _takes_next(d: Directive) -> bool:
    """Returns whether the value of an option is the next option, but no name such as -loss."""
    taken = "--|-[A-Za-z]$" if d.flag in ("--job-name", "--comment") else _TAKEN
    return bool(re.match(taken, d.value)) and not d.fault and "=" not in d.written


@check("SLURM003", "error", "an option without its value, or an ambiguous one")
def _incomplete_option(subject: Subject) -> Iterator[Problem]:
    options = list(_options(subject))
    read = subject.script.read()
    num_empty = sum(d.fault == "no value" or _takes_next(d) for d in read)
    num_empty += sum(not (d.value or d.fault) and bool(_TAKES_NUMBER.match(d.flag)) for d in read)
    for d in options:
        written = shown(d.written)
        if d.fault == "ambiguous":
            names = find_option(d.flag[2:])
            several = ", ".join(f"--{name}" for name in names) if isinstance(names, tuple) else ""
            remedy = _ONE_DASH.format(d.flag[2:]) if d.flag[2:] in _LETTERS else "write the whole name"
            yield Problem(d.line, f"{shown(d.flag)} is ambiguous: {plain(several)}", remedy)
        elif _takes_next(d):
            what = f"{written} has no value, so sbatch takes {shown(d.value)} as its value"
            # A comment says what belongs there, and accounts are often removed before publication.
            has_comment = re.search(rf"\s{re.escape(d.written)}\s+#", subject.script.lines[d.line - 1])
            is_to_fill_in = d.flag == "--account" or num_empty > 1 or has_comment is not None
            yield Problem(d.line, what, _GIVE, is_to_fill_in=is_to_fill_in)
        elif d.flag == "--gres" and not d.value and not d.fault:
            what = "--gres is empty, which Slurm rejects since 21.08"
            yield Problem(d.line, what, "name a resource, or remove it", "warning")
        elif d.fault == "no value":
            what = f"{written} has no value, so sbatch rejects it"
            is_to_fill_in = num_empty > 1 or d.flag in _OFTEN_EMPTY
            yield Problem(d.line, what, _GIVE, is_to_fill_in=is_to_fill_in)
        elif d.fault == "extra value":
            remedy = _OF_SRUN if d.flag == "--wait" else "write it without a value, or remove it"
            yield Problem(d.line, f"{written} takes no value, so sbatch rejects it", remedy)


@check("SLURM015", "error", "a value that sbatch rejects")
def _rejected_value(subject: Subject) -> Iterator[Problem]:
    version = subject.scheduler_version
    options = list(_options(subject))
    strays, with_colons = ({d.line for d in options if d.fault == fault} for fault in ("stray", "colon"))
    for d in options:
        # SLURM017 reports a blank before the value.
        is_cut = d.value in _CUT and d.line in strays
        is_cut |= d.value.endswith(":") and d.line in with_colons
        if d.fault or d.flag == "--time" or "$" in d.value or is_cut:
            continue
        is_used = subject.script.value(d.flag) == d.value and d.line not in strays
        # Slurm ignores a comma at the end of a list (tried with 22.05).
        is_list = d.value.endswith(",") and d.flag in ("--partition", "--nodelist")
        is_used &= not is_list
        if d.value.endswith((";", ",")) and d.flag in (*_NAMED, *_NAMES_OF_JOBS) and is_used:
            what = f"sbatch takes the {d.value[-1]} for a part of {d.flag} {shown(d.value)}"
            remedy = f"remove the {d.value[-1]}"
            yield Problem(d.line, what, remedy, "note" if d.flag == "--job-name" else "warning")
        if d.flag == "--gres" and re.match(r"(?:gpus|[avhp]\d{2,3}|gh200)(?::|$)", d.value):
            what = f"on most sites, GPUs are --gres=gpu, not {shown(d.value)}"
            yield Problem(d.line, what, "write --gres=gpu:NUMBER or --gres=gpu:TYPE:NUMBER", "note")
        long = with_two_dashes(d)
        if d.flag in ("--output", "--error") and re.fullmatch(r".*/|/[^/]+", d.value):
            is_root = not d.value.endswith("/")
            what = (
                f"the log {shown(d.value)} is {'in the root' if is_root else 'a'} directory, so the job fails"
            )
            yield Problem(d.line, what, "write DIRECTORY/%j.out", "note" if is_root else None)
        if d.flag in (*_NAMED, *_NAMES_OF_JOBS) and (d.value.startswith("=") or (long and "=" in d.value)):
            is_used = subject.script.value(d.flag) == d.value
            if is_used and (not d.written.startswith("--") or d.flag in _NAMED):
                what = f"sbatch reads {shown(d.written)} as {d.flag} {shown(d.value)}"
                remedy = long or f"write {d.flag}{plain(d.value)}"
                yield Problem(d.line, what, remedy, None if d.flag in _NAMED else "warning")
        elif expected := expected_value(d.flag, d.value, version):
            # qsub -N is the name of a job.
            is_of_job = d.written.startswith("-N") and re.fullmatch(r"[A-Za-z_][\w.-]{3,}", d.value)
            remedy = long or f"write {expected}; see sbatch(1)"
            if is_of_job:
                remedy = f"write -J {plain(d.value)} if it is the name of the job, otherwise {expected}"
            elif (value := d.value.lstrip("=")) != d.value and not expected_value(d.flag, value, version):
                remedy = f"write {d.flag}={plain(value)}"
            is_name = d.flag == "--nodes" and not _OF_NODES.fullmatch(d.value)
            is_to_fill_in = _is_open(d)
            if _TAKES_NUMBER.match(d.flag) and not (is_name or long):
                is_to_fill_in |= stands_for_value(re.sub("^after[a-z]*:", "", d.value))
            what = f"sbatch rejects {d.flag} {shown(d.value)}"
            # sbatch reads the indices of an array only from the command line, if they are there, too.
            is_replaced = d.flag == "--array" and d.flag in subject.given_on_submission
            yield Problem(d.line, what, remedy, "note" if is_replaced else None, is_to_fill_in)
        elif d.flag == "--priority" and not re.match(r"(?i:top)$|\d", d.value):
            what = f"sbatch takes --priority {shown(d.value)} for 0, and ignores it"
            yield Problem(d.line, what, "remove it: only operators can raise a priority", "note")
        elif d.flag == "--array" and re.search(r"%(?!\d+\]?$)", d.value):
            what = f"Slurm ignores the limit after % in --array {shown(d.value)}"
            yield Problem(d.line, what, "write a number of tasks after %", "note")


def _is_open(d: Directive) -> bool:
    """Returns whether a value is empty, or has letters in place of numbers, such as --gres=gpu:N."""
    of_gres = d.flag == "--gres" and d.value.endswith((":", ":x", ":n", ":N", "X"))
    of_array = d.flag == "--array" and re.match(r"[A-Za-z]{3,}\d*-[A-Za-z]{3}", d.value) is not None
    return not d.value or of_gres or of_array


@check("SLURM016", "error", "options that exclude each other")
def _contradictions(subject: Subject) -> Iterator[Problem]:
    version = subject.scheduler_version
    for pair in _all_contradictions(subject):
        is_for_all = not (pair.since or pair.until)
        if is_for_all or (version and is_between(version, pair.since, pair.until)):
            severity: Severity | None = "note" if _may_be_given(subject, pair) else None
            yield Problem(subject.line_of(*pair.flags), pair.what, pair.remedy, severity)


def _may_be_given(subject: Subject, pair: Contradiction) -> bool:
    """Returns whether a usage, or a script that submits itself, gives sbatch one of the options."""
    options = "|".join(("--gres", "--gpus", *map(re.escape, pair.flags)))
    gives = rf"\bsbatch\s.{{,200}}(?:{options})"
    name = rf"|(?:\S*/)?{re.escape(subject.path.name)}" if subject.path else ""
    itself = rf"[\s(\"'](?:\$\{{?0{name})(?![\w-]|\.\w)"
    shown_or_run = rf"(?m)^(?:[ \t]*#.{{,200}}{gives}|.{{,200}}{gives}.{{,200}}{itself})"
    return re.search(shown_or_run, subject.script.text) is not None


def _all_contradictions(subject: Subject) -> Iterator[Contradiction]:
    """Yields the contradictions in any version of Slurm."""
    options = [d for d in subject.script.read() if not d.fault]
    unknown = {d.flag for d in options if "$" in d.value or d.line in subject.placeholder_lines}
    yield from contradictions({d.flag: "" if d.flag in unknown else d.value for d in options})


@check("SLURM017", "error", "a word that does not belong to an option")
def _stray_word(subject: Subject) -> Iterator[Problem]:
    version, lines = subject.scheduler_version, set()
    options = list(_options(subject))
    for before, d in pairwise((None, *options)):
        # SLURM003 reports the option whose value is missing, so that this one's value is left over.
        is_left = before is not None and _TAKEN.match(before.value) and not before.fault
        if d is None or d.line in lines or d.fault not in ("stray", "unclosed", "colon"):
            continue
        # A variable may stand for words, but the blanks in $(date +%F) end the option.
        if (is_left or "$" in re.sub(r"\$\([^)]*\s", "", d.text)) and d.fault == "stray":
            continue
        lines.add(d.line)
        if "\\ " in subject.script.lines[d.line - 1]:
            # Since 24.05, a backslash protects a blank.
            if not (version and is_between(version, "24.05", "")):
                what = "before Slurm 24.05, a backslash does not keep words together, so sbatch rejects "
                what += shown(d.value)
                remedy = "quote the whole value"
                yield Problem(d.line, what, remedy, None if version else "warning")
        elif d.fault == "unclosed":
            what = f"a quote is not closed in {shown(d.text)}"
            yield Problem(d.line, what, "close the quote, or remove it")
        elif d.fault == "colon":
            what = f"sbatch rejects a word that begins with a colon: {shown(d.text)}"
            flag, _, value = re.sub(r"\s", "", d.text).partition("=")
            is_value = bool(value) and not expected_value(flag, value)
            yield Problem(d.line, what, "remove the blanks from the value" if is_value else "remove it")
        elif before is not None and before.line == d.line and before.value in _CUT and before.flag[1] == "-":
            is_apart = before.value == "="
            what = f"a blank follows {before.flag}=, so it has no value, and sbatch rejects the script"
            what = "blanks around = end the option" if is_apart else what
            is_short = is_apart and before.written != before.flag  # it may stand for several options
            remedy = _AS_ONE if is_short else f"write {before.flag}={plain(d.value).lstrip('=')}"
            if sum(one.line == d.line and one.fault == "stray" for one in options) > 1:
                remedy += ", and quote a value with blanks"
            yield Problem(d.line, what, remedy)
        elif d.value.startswith("="):
            yield Problem(d.line, "blanks around = end the option", _AS_ONE)
        else:
            has_dash = d.value[0] in "\u2013\u2014"
            # In a script without directives, `#SLURM...` is probably a comment.
            is_comment = not any(other.flag for other in options)
            is_comment = is_comment and subject.script.lines[d.line - 1].startswith("#SLURM")
            what = f"{shown(d.value)} does not belong to an option, so sbatch rejects the script"
            if has_dash:
                what = f"a long dash instead of - or -- begins {shown(d.value[1:])}, so sbatch rejects it"
            is_first = before is None or before.line != d.line
            severity: Severity | None = "note" if is_comment else None
            is_option = not isinstance(find_option(d.value.lower()), tuple)  # without its dashes
            is_to_fill_in = bool(_DESCRIPTION.search(d.text) or re.search(r"\{ *\w+ *\}", d.text))
            is_to_fill_in |= bool(
                is_first
                and re.fullmatch(r"[A-Z][A-Z_]+(?:_\d*[A-Za-z]+|_\d+_[A-Z]+)?", d.value)
                and not is_option
            )
            yield Problem(d.line, what, _remedy_of_stray(before, d), severity, is_to_fill_in)


def _remedy_of_stray(before: Directive | None, d: Directive) -> str:
    """Returns what to do about the word `d` that follows the option `before`."""
    if d.value[0] in "\u2013\u2014":
        return "write - or -- instead of the dash"
    if re.match("__|_[A-Za-z]$", d.value):
        name, equals, value = d.value.partition("=")
        dashes = "--" if name.startswith("__") else "-"
        return f"write {plain(dashes + name.strip('_').replace('_', '-') + equals + value)}"
    if d.value == "-":
        return "remove the blank after -"
    if before is not None and (glued := re.search(r"\w(--[a-z][\w-]+)", before.value)):
        return f"write a blank before {plain(glued[1])}"
    if before is None or before.line != d.line:
        return "write its dashes or its option before it, or # if it is a comment"
    if with_two_dashes(before) and "=" not in before.written:
        return f"write -{plain(before.written)}={plain(d.value)}"
    if before.value.endswith(","):
        return "remove the blanks from the value"
    remedy = f"write # before {shown(d.value)} if it is a comment"
    return f"{remedy}; otherwise quote or remove the blank before it, or add its option"


@check("SLURM020", "warning", "a log directory that does not exist")
def _no_log_directory(subject: Subject) -> Iterator[Problem]:
    script, version = subject.script, subject.scheduler_version
    if version and is_between(version, "23.02", ""):
        return  # Slurm creates the directory
    # If the version is unknown, it is probably newer.
    severity: Severity | None = None if version else "note"
    before = "" if version else "before Slurm 23.02, "
    chdir = script.value("--chdir")
    start = None if chdir and "$" in chdir else subject.directory and subject.directory / (chdir or "")
    created = created_directories(script)
    problems: dict[str, Problem] = {}  # by directory
    for d in (one for one in script.read() if one.flag in ("--output", "--error")):
        remedy = f"create it before submitting: mkdir -p {shown(d.value.rpartition('/')[0])}"
        directory = directory_of(d.value)
        # It may be submitted from a directory above the one where it is stored, as in a repository.
        is_near = subject.path and not subject.directory and exists_near(subject.path, directory)
        if subject.template or is_near or directory == chdir:
            continue
        if line := created.get(directory):
            what = f"Slurm opens this log before line {line} creates its directory, so {before}the job fails"
        elif version and "%" in directory:
            what = f"Slurm does not create the directory {shown(directory)}, so the job fails"
            remedy = "put the log into a directory that exists"
        elif missing := missing_directory(d.value, start):
            what = f"the log directory {shown(missing)} does not exist, so {before}the job fails"
        else:
            continue
        problems.setdefault(directory, Problem(d.line, what, remedy, severity))
    yield from problems.values()


@check("SLURM022", "error", "an option of other versions of Slurm")
def _option_of_other_version(subject: Subject) -> Iterator[Problem]:
    # If the site's version is unknown, an option is an error only if no version since 20.11 has it.
    version = subject.scheduler_version
    for d in _options(subject):
        option = find_option(d.written[2:].partition("=")[0]) if d.written.startswith("--") else ()
        if d.fault or isinstance(option, tuple) or OF_PLUGINS.fullmatch(option.name):
            continue
        if option.until if not version else not option.is_in(version):
            have = f"only Slurm up to {option.until}" if option.until else f"only Slurm since {option.since}"
            remedy = _INSTEAD.get(f"--{option.name}", "")
            yield Problem(
                d.line,
                f"{have} has --{option.name}, " + (f"but the site has {version}" if version else _REJECT),
                f"use {remedy}" if remedy else "remove it",
                "warning" if not version and option.is_in(VERSIONS[2]) else None,
            )


@check("SLURM023", "note", "a request that some versions of Slurm reject")
def _rejected_by_some_versions(subject: Subject) -> Iterator[Problem]:
    if subject.scheduler_version:
        return  # then SLURM015 and SLURM016 report what this version rejects
    for d in _options(subject):
        versions, expected = rejecting_versions(d.flag, d.value)
        if versions and not d.fault and not expected_value(d.flag, d.value):
            yield Problem(d.line, f"Slurm {versions} rejects {d.flag} {shown(d.value)}", f"write {expected}")
    for pair in _all_contradictions(subject):
        if pair.since or pair.until:
            what = f"{pair.what}, which Slurm up to {pair.until} rejects"
            what = f"since Slurm {pair.since}, {pair.what}" if pair.since else what
            yield Problem(subject.line_of(*pair.flags), what, pair.remedy)


@check("JOB019", "error", "directives of another scheduler that sbatch rejects")
def _refused_by_sbatch(subject: Subject) -> Iterator[Problem]:
    # sbatch reads #BSUB lines or else #PBS lines, also after the first commands (src/sbatch/xlate.c).
    script = subject.script
    if script.scheduler != "slurm" or re.search(r"\s--ignore-pbs\b|SBATCH_IGNORE_PBS", script.text):
        return
    bsub = [
        (number, word)
        for number, line in enumerate(script.lines, start=1)
        if (match := _BSUB_LINE.match(line))
        for word in match[1].split()
        if word.startswith("-")
    ]
    pbs = [
        (d.line, d.flag or d.value) for d in script.directives_of("pbs") if script.lines[d.line - 1][0] == "#"
    ]
    prefix, letters = ("#BSUB", _BSUB_OF_SBATCH) if bsub else ("#PBS", _PBS_OF_SBATCH)
    for line, word in bsub or pbs:
        if not word.startswith("-") or word[1:2] not in letters:
            what = f"sbatch also reads {prefix} lines, and rejects {shown(word)} in them"
            remedy = f"remove all {prefix} lines, or use sbatch --ignore-pbs, which ignores them"
            # Whoever fills in the script may choose the directives of one scheduler.
            is_template = "template" in subject.script.text.lower() and bool(bsub and pbs)
            yield Problem(line, what, remedy, is_to_fill_in=is_template or bool(subject.placeholder_lines))
