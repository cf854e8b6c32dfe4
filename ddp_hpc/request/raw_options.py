"""Options that the user writes in the syntax of the scheduler or of the launcher."""

from __future__ import annotations

import re
import shlex

from ddp_hpc.base.errors import RequestError

_PREFIXED = re.compile(r"\s*(#(?:SBATCH|PBS))\s+(?=-)")
_MAX_CHARS = 1000
# These options of launchers would contradict the layout of the ranks.
_LAYOUT_FLAGS = frozenset(
    ("-n", "-np", "--np", "--ntasks", "-N", "--nodes", "--ppn", "-ppn", "--ntasks-per-node", "-c")
) | {"--cpus-per-task", "--tasks-per-node", "--npernode"}


def raw_directive(text: str) -> tuple[str, str]:
    """Returns the prefix of a directive, such as `#SBATCH` or an empty string, and the option after it.

    Raises:
        RequestError: the text is not an option that can be written in a directive.
    """
    match = _PREFIXED.match(text)
    prefix, option = (match[1], text[match.end() :].rstrip()) if match else ("", text.strip())
    shown = ascii(text if len(text) <= 80 else f"{text[:77]}...")
    if not option.startswith("-") or not option.isprintable() or len(option) > _MAX_CHARS:
        raise RequestError(
            f"--directive {shown} is not a scheduler option on one line. Use for example --directive "
            "'--switches=1'."
        )
    words = _split(option, f"--directive {shown}")
    if any(word.startswith("#") for word in words):
        raise RequestError(f"--directive {shown} contains a comment, which qsub rejects. Remove the comment.")
    return prefix, option


def directive_in_setup(line: str) -> str:
    """Returns the option of `--directive` for a setup line that is a directive; otherwise an empty string."""
    match = _PREFIXED.match(line)
    return line[match.end() :].rstrip() if match else ""


def launcher_words(text: str) -> list[str]:
    """Returns the words of one --launcher-arg, split as by a shell, without expansion.

    Raises:
        RequestError: the text is not an option of a launcher, or it changes the number of ranks or nodes.
    """
    shown = ascii(text if len(text) <= 80 else f"{text[:77]}...")
    words = _split(text, f"--launcher-arg {shown}") if text.isprintable() else []
    if not words or not words[0].startswith("-") or {":", "--"} & {*words}:
        raise RequestError(
            f"--launcher-arg {shown} is not an option of a launcher. Use for example --launcher-arg "
            "'--cpu-bind=cores'."
        )
    for word in words:
        flag = word.partition("=")[0]
        if flag in _LAYOUT_FLAGS or re.fullmatch(r"-[nNc][0-9]+", flag):
            raise RequestError(
                f"--launcher-arg {shown} sets {flag}, which ddp-hpc writes itself. Use --nodes, "
                "--ranks-per-node and --cpus-per-node."
            )
    return words


def _split(text: str, named: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise RequestError(f"{named} has an unclosed quote ({error}). Close it.") from None
