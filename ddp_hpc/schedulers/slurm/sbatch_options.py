"""The options of sbatch and srun, and how getopt_long reads their names.

Sources: the tables `slurm_cli_opt_t` in src/common/slurm_opt.c of SchedMD/slurm, in the last releases of
19.05 to 26.05; for 18.08 and earlier versions, src/sbatch/opt.c; for srun, the answers of srun 22.05.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from dataclasses import dataclass
from functools import cache
from itertools import takewhile

from ddp_hpc.schedulers.versions import is_between

VERSIONS = (
    "18.08",
    "19.05",
    "20.11",
    "21.08",
    "22.05",
    "23.02",
    "23.11",
    "24.05",
    "24.11",
    "25.05",
    "25.11",
    "26.05",
)
"""The versions of Slurm in the tables. 20.02 had the options of 19.05."""

# `!` means without a value, `?` with an optional value after =. `>=` and `<=` are the first and the last
# version with the option; without them, all versions have it.
_TABLE = """
account:A acctg-freq array:a autocomplete>=23.02 batch bb bbf begin:b chdir:D checkpoint<=19.05 cluster
cluster-constraint clusters:M comment consolidate-segments!>=25.11 constraint:C container>=21.08
container-id>=23.02 container-type>=26.05 context>=21.08 contiguous! core-spec:S cores-per-socket cpu-freq
cpus-per-gpu cpus-per-task:c deadline delay-boot dependency:d distribution:m error:e exclude:x exclusive?
export export-file external!>=25.05 extra>=23.02 extra-node-info:B get-user-env? gid gpu-bind gpu-freq gpus:G
gpus-per-node gpus-per-socket gpus-per-task gres gres-flags help!:h hint hold!:H ignore-pbs! immediate!<=18.08
input:i job-name:J jobid<=18.08 kill-on-invalid-dep licenses:L mail-type mail-user mcs-label mem mem-bind
mem_bind<=18.08 mem-per-cpu mem-per-gpu mem-update>=26.05 mincpus network nice? no-kill?:k no-requeue!
nodefile:F nodelist:w nodes:N ntasks:n ntasks-per-core ntasks-per-gpu>=20.11 ntasks-per-node ntasks-per-socket
ntasks-per-tres>=20.11 oom-kill-step?>=24.11 open-mode output:o overcommit!:O oversubscribe!:s parsable!
partition:p power<=23.11 prefer>=22.05 priority profile propagate? qos:q quiet!:Q reboot! requeue? reservation
resources>=25.11 resv-ports?>=24.05 segment>=24.05 share!<=18.08 signal sockets-per-node spread-job!
spread-segments!>=25.11 stepmgr!>=24.05 switches tasks-per-node test-only! thread-spec threads-per-core time:t
time-min tmp tres-bind>=23.11 tres-per-task>=23.02 uid usage! use-min-nodes! verbose!:v version!:V wait!:W
wait-all-nodes wckey workdir<=18.08 wrap x11?<=18.08
"""
# The options of sbatch that srun does not have, and those that only srun has, or that srun reads differently.
_NOT_OF_SRUN = frozenset(
    ("array", "batch", "export-file", "get-user-env", "ignore-pbs", "kill-on-invalid-dep", "no-requeue")
) | {"parsable", "requeue", "wait-all-nodes", "wrap"}
_SRUN_TABLE = """
accel-bind async!>=23.11 bcast? bcast-exclude compress? cpu-bind cpu_bind debugger-test! disable-status!:X
epilog exact! external-launcher!>=24.11 het-group ignore-signals>=23.11 immediate?:I interactive! jobid
kill-on-bad-exit?:K label!:l mpi msg-timeout multi-prog! no-allocate!:Z overlap! pack-group preserve-env!:E
prolog pty! quit-on-interrupt! relative:r resv-ports? send-libs? slurmd-debug task-epilog task-prolog
threads:T treewidth>=23.11 unbuffered!:u wait:W wait-for-children!>=23.11 whole! x11?
"""
_ENTRY = re.compile(r"([\w-]+)([!?]?)(?:>=([\d.]+))?(?:<=([\d.]+))?(?::(\w))?")

ALIASES = {
    "tasks-per-node": "ntasks-per-node",
    "cluster": "clusters",
    "workdir": "chdir",
    "share": "oversubscribe",
}
"""Old or alternative names of options; `mem_bind` became `mem-bind` in 19.05."""
ALIASES["mem_bind"] = "mem-bind"


@dataclass(frozen=True, kw_only=True)
class SbatchOption:
    """An option of sbatch. `value` is `required`, `optional` (only after `=`) or `none`."""

    name: str
    value: str
    since: str
    until: str
    letter: str = ""

    def is_in(self, version: str) -> bool:
        """Returns whether this version of Slurm has the option."""
        return is_between(version, self.since, self.until)

    @property
    def flag(self) -> str:
        """The option's current name, with its dashes."""
        return f"--{ALIASES.get(self.name, self.name)}"


def _options_in(table: str) -> dict[str, SbatchOption]:
    kinds = {"": "required", "!": "none", "?": "optional"}
    return {
        name: SbatchOption(name=name, value=kinds[kind], since=since, until=until, letter=letter)
        for name, kind, since, until, letter in _ENTRY.findall(table)
    }


OPTIONS = _options_in(_TABLE)
"""All options of sbatch by their long names."""
CURRENT = tuple(option.name for option in OPTIONS.values() if not option.until)
SRUN_OPTIONS = {name: option for name, option in OPTIONS.items() if name not in _NOT_OF_SRUN} | _options_in(
    _SRUN_TABLE
)
"""All options of srun by their long names."""


@cache
def _names_of(version: str, of_srun: bool) -> list[str]:
    known = SRUN_OPTIONS if of_srun else OPTIONS
    return sorted(name for name, option in known.items() if option.is_in(version))


def find_option(name: str, of_srun: bool = False) -> SbatchOption | tuple[str, ...]:
    """Returns the option that getopt_long finds for a long name or for an unambiguous beginning of it.

    If there is no such option, returns all names that begin with `name`: none or several. An option is found
    as soon as one version accepts the name or the beginning.
    """
    known = SRUN_OPTIONS if of_srun else OPTIONS
    best: tuple[str, ...] = ()
    for version in reversed(VERSIONS):
        names = _names_of(version, of_srun)
        first = bisect_left(names, name)
        begin = list(takewhile(lambda option: option.startswith(name), names[first:]))
        if begin[:1] == [name]:
            return known[name]
        if len(begin) == 1:
            return known[begin[0]]
        best = best or tuple(begin)
    return best
