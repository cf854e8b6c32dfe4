"""Shell completion of the names of profiles. It reads no profile."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


def complete_profiles(_context: Any, _parameter: Any, incomplete: str) -> list[CompletionItem]:
    """Returns the names of profiles that begin with `incomplete`, and for a path, the shell's completion."""
    from click.shell_completion import CompletionItem

    from ddp_hpc.sites.site import profile_files

    if "/" in incomplete:
        return [CompletionItem(incomplete, type="file")]
    return [CompletionItem(name) for name in profile_files() if name.startswith(incomplete)]
