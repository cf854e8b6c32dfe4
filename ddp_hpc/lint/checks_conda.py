"""Check of `conda activate`, which needs a shell function that batch scripts do not have."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import takewhile

from ddp_hpc.lint.blocks import may_run_elsewhere, with_depth
from ddp_hpc.lint.check_registry import Problem, Subject, check
from ddp_hpc.lint.launch_commands import single_quoted
from ddp_hpc.lint.parse_script import Command, Script

# The programs of an environment are also found, or called, by their path.
_PATH_OF_ENV = re.compile(r"(?m)PATH=.*\benvs/[\w.-]+/bin|^[ \t]*(?:srun\s)?[^\s=#]*/envs/[\w.-]+/bin/\w")
_ACTIVATE = re.compile(r"\b(conda|mamba|micromamba) activate\b")
_REMEDIES = {
    "conda": 'add eval "$(conda shell.bash hook)" before conda activate, or source '
    "CONDA_DIRECTORY/etc/profile.d/conda.sh",
    # mamba 1 has no command shell.
    "mamba": 'add eval "$(conda shell.bash hook)" before this command, and use conda activate',
    "micromamba": 'add eval "$(micromamba shell hook --shell bash)" before micromamba activate',
}
# Commands that define the shell function conda, or that may do so: startup files, modules and other scripts.
_HOOK = re.compile(
    r"shell[. ](?:hook|init|bash|zsh|posix)|__conda_setup|\beval\s+[\"']?\$\{?\w|"
    r"\beval\b.*\bhook\b|(?:^|[\s;&(\"'])(?:source|\\?\.)\s+\S|"
    r"(?:\b(?:module|ml|uenv|spack|vpkg_require|setpkgs)\b|^(?:(?:re)?use|load)\b)"
    r".*(?:(?i:conda|mamba|forge|open-?ce|wml-?ce)|python|torch|tensorflow)|\bbash -\w*[li]",
    re.MULTILINE,
)
# The name of a module, not only its version.
_LOADS_VARIABLE = re.compile(r"\b(?:module\s+load|ml)\s(?:[^\n]*\s)?[\"']?\$\{?\w+")
_OF_SHELL = re.compile(
    r"conda|mamba|micromamba|echo|printf|export|cd|module|date|hostname|mkdir|exit|set|nvidia-smi|"
    r"singularity|apptainer|docker|podman|shifter|cp|mv|rm|ls|cat|tar|gzip|rsync|scp|ssh|sleep"
)
_ENDS = ("exit", "echo", "printf", "return")  # after the failure of a command
_LOGIN_SHELL = re.compile(r"\b(?:ba|z|k)?sh\s+(?:-\w*[li]|--login)|\b(?:csh|tcsh|zsh)\b")
_LOADS_PYTHON = re.compile(r"(?i)(?:module|ml)\s(?!\s*(?:unload|rm|purge))[^#]*(?:python|conda|miniforge)")


@check("JOB023", "warning", "conda activate without its shell function")
def _conda_without_hook(subject: Subject) -> Iterator[Problem]:
    script = subject.script
    if _LOGIN_SHELL.search(script.shebang):
        return
    before = ""
    for index, (command, depth) in enumerate(with_depth(script.commands)):
        in_task = single_quoted(command.text) if command.launched[1:2] == ("-c",) else ""
        text = in_task if _ACTIVATE.search(in_task) else command.text
        match = _ACTIVATE.search(text)
        is_activation = match and (in_task or command.argv[1:2] == ("activate",))
        name = match[1] if match else ""
        is_used = any(map(_uses_environment, script.commands[index:])) if match else False
        if (
            match
            and is_activation
            and not _has_hook(script, text[: match.start()], before, depth, bool(in_task))
        ):
            following = script.commands[index + 1 :]
            before_use = list(
                takewhile(lambda c: c.name in ("source", ".") or not _uses_environment(c), following)
            )
            has_other = _PATH_OF_ENV.search(script.text) or any(
                c.argv[:2] in (("source", "activate"), (".", "activate")) for c in before_use
            )
            # Without a name, it activates base, which a module that is loaded afterwards replaces.
            is_replaced = len(command.argv) < 3 and any(_LOADS_PYTHON.match(c.text) for c in following)
            is_known_to_fail = command.ends == "||" and following[:1] and following[0].name not in _ENDS
            may_be_defined = is_known_to_fail or "module restore" in before
            may_be_defined = may_be_defined or may_run_elsewhere(script, command.line)
            is_sure = in_task or (is_used and not (is_replaced or has_other or may_be_defined))
            what = (
                f"a batch script does not read .bashrc, so {name} activate fails, unless the site defines it"
            )
            if subject.scheduler.reader.starts_login_shell and not in_task:
                is_sure = False  # of the startup files of a login shell, some read .bashrc
                what = f"{name} activate fails, unless the login shell of a PBS job reads .bashrc"
            yield Problem(command.line, what, _REMEDIES[name], None if is_sure else "note")
            return
        before += command.text.replace("\\\n", " ") + "\n"


def _has_hook(script: Script, in_command: str, before: str, depth: int, in_task: bool) -> bool:
    """Returns whether what comes before an activation may define the function conda."""
    if in_task:
        return bool(_HOOK.search(in_command) or re.search(r"export -f .*\bconda\b|\bBASH_ENV=", before))
    # A function runs where it is called, which may be after the hook.
    if depth and re.search(r"(?m)^[ \t]*(?:function\s+\w|[\w-]+\s*\(\))", script.text):
        before = "\n".join(command.text for command in script.commands)
    in_variable = _LOADS_VARIABLE.search(before) and re.search(r"(?i)conda|mamba|forge|[=( ]python", before)
    return bool(_HOOK.search(before) or in_variable)


def _uses_environment(command: Command) -> bool:
    """Returns whether a command starts a program that the environment may contain."""
    words = command.launched or command.argv
    return bool(words) and bool(re.match(r"[a-z]", words[0])) and not _OF_SHELL.fullmatch(words[0])
