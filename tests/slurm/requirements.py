"""The requirements of the test cluster on this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import cache

from .nodes import SYSTEM_PATH

PACKAGES = "slurmctld slurmd slurm-client munge libpmix-dev iproute2 util-linux"
ACCOUNTING_PACKAGES = "slurmdbd slurm-wlm-mysql-plugin mariadb-server"
_ACCOUNTING_PROGRAMS = ["slurmdbd", "sacct", "sacctmgr", "mariadbd", "mariadb", "mariadb-install-db"]
_PROGRAMS = [
    "munged",
    "slurmctld",
    "slurmd",
    "sbatch",
    "srun",
    "ip",
    "nsenter",
    "unshare",
    "setpriv",
    "hostname",
]


@cache
def what_is_missing() -> str | None:
    """Returns one line that says what this machine lacks and how to add it; None if nothing is missing."""
    lacks = ["root"] if os.geteuid() else []
    missing = [name for name in _PROGRAMS if shutil.which(name, path=SYSTEM_PATH) is None]
    lacks += [f"the programs {' '.join(missing)}"] if missing else []
    if not lacks:
        probe = ["unshare", "--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "true"]
        if subprocess.run(probe, capture_output=True).returncode:
            lacks = ["the right to make namespaces (a container needs --privileged)"]
    if not lacks:
        return None
    return (
        f"the Slurm tests lack {', '.join(lacks)}: run pytest as root, after "
        f"`apt-get install -y --no-install-recommends {PACKAGES}` (Debian's package names)"
    )


@cache
def what_is_missing_for_accounting() -> str | None:
    """Returns one line like `what_is_missing`, for a cluster with accounting."""
    missing = [name for name in _ACCOUNTING_PROGRAMS if shutil.which(name, path=SYSTEM_PATH) is None]
    if not missing:
        return what_is_missing()
    packages = f"{PACKAGES} {ACCOUNTING_PACKAGES}"
    return (
        f"the tests of Slurm's accounting lack the programs {' '.join(missing)}: run pytest as root, after "
        f"`apt-get install -y --no-install-recommends {packages}` (Debian's package names)"
    )
