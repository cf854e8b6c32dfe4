"""Runs one rank under Hydra: `run_rank.py SPOOL COMMAND...`, with its environment from SPOOL/step.json.

A rank keeps only those variables of Hydra that MPI needs, so that programs do not detect Hydra as their
launcher. For rank R, SPOOL/pid.R contains the process id, and SPOOL/rank.R the exit code or negated signal.
The files are needed because Hydra returns only the bitwise OR of all exit codes.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

_PMI_VARIABLES = ("PMI_FD", "PMI_RANK", "PMI_SIZE")
_NO_PROGRAM = 127


def main() -> None:
    """Runs the rank as a child of this process, which Hydra has started."""
    directory, *command = sys.argv[1:]
    spool, rank = Path(directory), int(os.environ["PMI_RANK"])
    step = json.loads((spool / "step.json").read_text())
    environment = step["environments"][rank]
    if step["keep_pmi"]:
        environment |= {name: os.environ[name] for name in _PMI_VARIABLES if name in os.environ}
    # Hydra sends signals to the whole process group. The program receives them directly, and this process
    # must survive them to report its exit code.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda _sent, _frame: None)
    try:
        # The program inherits all descriptors: MPI communicates with Hydra over PMI_FD.
        program = subprocess.Popen(
            command,
            env=environment,
            cwd=step["directory"],
            close_fds=False,
            preexec_fn=die_with_parent,
            restore_signals=True,
        )
    except OSError as error:
        sys.stderr.write(f"execve failed: {command[0]}: {error.strerror}\n")
        leave(spool, rank, _NO_PROGRAM, step["keep_pmi"])
    write(spool / f"pid.{rank}", program.pid)
    leave(spool, rank, program.wait(), step["keep_pmi"])


def die_with_parent() -> None:
    """Makes the kernel kill the rank when this process ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG


def write(file: Path, number: int) -> None:
    """Writes a file atomically."""
    new = file.with_name(f"new.{file.name}")
    new.write_text(str(number))
    new.replace(file)


def leave(spool: Path, rank: int, code: int, keep_pmi: bool) -> None:
    """Ends this process with the exit code of the rank."""
    write(spool / f"rank.{rank}", code)
    # A rank without MPI always exits with 0, since Hydra would print a banner for any other code.
    sys.exit((code if code >= 0 else 128 - code) if keep_pmi else 0)


main()
