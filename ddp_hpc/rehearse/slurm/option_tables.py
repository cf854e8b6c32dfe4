"""The options of srun and sbatch (from --help of Slurm 22.05), and the messages about invalid options."""

from __future__ import annotations

import re

from ddp_hpc.rehearse.launchers.options import RefusedError, Table, spellings

# Each entry is a long name, optionally followed by a colon and the short name.
_VALUES_COMMON = """
account:A acctg-freq bb bbf begin:b chdir:D cluster-constraint clusters:M comment constraint:C container
core-spec:S cores-per-socket cpu-freq cpus-per-gpu cpus-per-task:c deadline delay-boot dependency:d
distribution:m error:e exclude:x export extra extra-node-info:B gpu-bind gpu-freq gpus:G gpus-per-node
gpus-per-socket gpus-per-task gres gres-flags hint input:i job-name:J licenses:L mail-type mail-user
mcs-label mem mem-bind mem-per-cpu mem-per-gpu mincpus network nodelist:w nodes:N ntasks:n ntasks-per-core
ntasks-per-gpu ntasks-per-node ntasks-per-socket output:o partition:p power prefer priority profile qos:q
reservation signal sockets-per-node switches thread-spec threads-per-core time:t time-min tmp tres-per-task
wckey
"""
_BARE_COMMON = """
contiguous exclusive help:h hold:H nice no-kill:k overcommit:O oversubscribe:s propagate quiet:Q reboot
spread-job usage use-min-nodes verbose:v version:V
"""
_VALUES_SRUN = """
bcast bcast-exclude cpu-bind epilog het-group jobid mpi open-mode prolog relative:r slurmd-debug task-epilog
task-prolog threads:T wait:W
"""
_BARE_SRUN = """
compress disable-status:X exact immediate:I kill-on-bad-exit:K label:l multi-prog no-allocate:Z overlap
preserve-env:E pty quit-on-interrupt resv-ports send-libs unbuffered:u
"""
_VALUES_SBATCH = (
    "array:a batch export-file gid kill-on-invalid-dep nodefile:F open-mode uid wait-all-nodes wrap"
)
_BARE_SBATCH = "get-user-env ignore-pbs no-requeue parsable requeue test-only wait:W"


BAD_OPTION = '{program}: {{what}}\nTry "{program} --help" for more information'
_REFUSED = 255


def _table(program: str, values: str, bare: str) -> Table:
    return Table(
        values=spellings(_VALUES_COMMON + values),
        bare=spellings(_BARE_COMMON + bare),
        long_only=False,
        bad_option=BAD_OPTION.format(program=program),
        bad_number=f'{program}: error: Invalid numeric value "{{text}}" for --{{name}}.',
        exit_codes=(_REFUSED, 1),
    )


SRUN = _table("srun", _VALUES_SRUN, _BARE_SRUN)
SBATCH = _table("sbatch", _VALUES_SBATCH, _BARE_SBATCH)


def node_count(program: str, text: str) -> int:
    """Returns the minimum number of nodes from `N` or `MIN-MAX`."""
    match = re.fullmatch(r"([0-9]{1,7})(?:-([0-9]{1,7}))?", text)
    if not match or int(match[1]) < 1:
        raise RefusedError(f'{program}: error: "{text}" is not a valid node count', _REFUSED)
    return int(match[1])


def walltime_s(text: str) -> int:
    """Returns the seconds of `M`, `M:S`, `H:M:S`, `D-H`, `D-H:M` or `D-H:M:S`; 0 means no limit.

    Raises:
        RefusedError: the text has another format.
    """
    if text.lower() in ("unlimited", "infinite", "0"):
        return 0
    match = re.fullmatch(r"(?:(\d{1,5})-)?(\d{1,7})(?::(\d{1,7}))?(?::(\d{1,7}))?", text)
    if not match:
        raise RefusedError("sbatch: error: Invalid --time specification", _REFUSED)
    days, parts = match[1], [int(part) for part in match.groups()[1:] if part is not None]
    if days is not None:
        hours, minutes, seconds = [*parts, 0, 0][:3]
    else:
        hours, minutes, seconds = {1: [0, *parts, 0], 2: [0, *parts], 3: parts}[len(parts)]
    return int(days or 0) * 86400 + hours * 3600 + minutes * 60 + seconds
