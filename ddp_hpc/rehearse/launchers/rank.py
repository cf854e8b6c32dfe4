"""One rank: `rank.py SPOOL COMMAND...` under Hydra, in the environment that SPOOL/step.json has for it.

Of Hydra's own variables only those by which MPI talks to it are kept, so that a rank
cannot take Hydra for its launcher. The process id goes into SPOOL/pid.R and the exit
code into SPOOL/rank.R, as Hydra only hands on all codes ORed; a signal is a negative
number there.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

_OF_PMI = ("PMI_FD", "PMI_RANK", "PMI_SIZE")


def main() -> None:
    """The process that Hydra starts."""
    folder, *command = sys.argv[1:]
    spool, rank = Path(folder), int(os.environ["PMI_RANK"])
    step = json.loads((spool / "step.json").read_text())
    environment = step["environments"][rank]
    if step["keep_pmi"]:
        environment |= {name: os.environ[name] for name in _OF_PMI if name in os.environ}
    # Hydra gives a signal to the rank's whole process group: the program has got it already.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda _sent, _frame: None)
    try:
        # Everything inherited: MPI talks to Hydra over PMI_FD.
        program = subprocess.Popen(
            command,
            env=environment,
            cwd=step["folder"],
            close_fds=False,
            preexec_fn=die_with_parent,
            restore_signals=True,
        )
    except OSError as error:
        sys.stderr.write(f"{step['no_program']}: {command[0]}: {error.strerror}\n")
        leave(spool, rank, step["no_program_code"], step["keep_pmi"])
    write(spool / f"pid.{rank}", program.pid)
    leave(spool, rank, program.wait(), step["keep_pmi"])


def die_with_parent() -> None:
    """SIGKILL for the rank when this process is gone."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG


def write(file: Path, number: int) -> None:
    """A file that is whole or not there."""
    new = file.with_name(f"new.{file.name}")
    new.write_text(str(number))
    new.replace(file)


def leave(spool: Path, rank: int, code: int, keep_pmi: bool) -> None:
    """Ends as the rank did."""
    write(spool / f"rank.{rank}", code)
    # Hydra has a banner for what it takes for a failure of its own MPI.
    sys.exit((code if code >= 0 else 128 - code) if keep_pmi else 0)


main()
