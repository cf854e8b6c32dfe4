"""Detects the site profile of this machine."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from fnmatch import fnmatchcase

from ddp_hpc.base.toml_config import read_toml
from ddp_hpc.sites.profile_tables import Detect
from ddp_hpc.sites.site import profile_files


def choose_profile(option: str, job_file: str, environ: Mapping[str, str]) -> tuple[str, str]:
    """Returns the name of the profile and the reason for it.

    The name of the profile comes from the first of these sources that provides one: `--profile`, the job
    file, DDP_HPC_PROFILE, the [detect] tables of all profiles, and the commands on the PATH. The default is
    generic_slurm. `load_site` reports an unknown name.
    """
    if option:
        return option, "named by --profile"
    if job_file:
        return job_file, "named by the job file"
    if name := environ.get("DDP_HPC_PROFILE"):
        return name, "named by DDP_HPC_PROFILE"
    host = os.uname().nodename
    known: dict[str, Detect] = {}
    for name, path in profile_files().items():
        known[name] = read_toml(path, Detect, table="detect")
        if why := match(known[name], host, environ):
            return name, why
    return _by_command(known, environ)


def match(facts: Detect, host: str, environ: Mapping[str, str]) -> str:
    """Returns the reason why a [detect] table matches this machine; empty if it does not match."""
    for pattern in facts.host_patterns:
        if fnmatchcase(host, pattern):
            return f"this host is {host}"
    for name, pattern in facts.environment.items():
        if name in environ and fnmatchcase(environ[name], pattern):
            return f"{name} is {environ[name]}"
    return ""


def is_here(facts: Detect, environ: Mapping[str, str]) -> bool:
    """Returns whether a [detect] table matches this machine, or selects any machine with a scheduler."""
    return bool(facts.command or match(facts, os.uname().nodename, environ))


def may_be_here(facts: Detect, environ: Mapping[str, str]) -> bool:
    """Returns whether a [detect] table matches this machine, or does not say which machines it matches."""
    is_of_one_site = bool(facts.host_patterns or facts.environment)
    return not is_of_one_site or bool(match(facts, os.uname().nodename, environ))


def _by_command(known: Mapping[str, Detect], environ: Mapping[str, str]) -> tuple[str, str]:
    path = environ.get("PATH", os.defpath)
    by_command = {name: facts for name, facts in known.items() if facts.command}
    for name, facts in by_command.items():
        other = facts.unless_command
        if shutil.which(facts.command, path=path) and not (other and shutil.which(other, path=path)):
            return name, f"{facts.command} is on the PATH"
    commands = " nor ".join(sorted((facts.command for facts in by_command.values()), reverse=True))
    return "generic_slurm", f"no profile fits this host, and neither {commands} is on the PATH"
