"""One rank: `rank.py PPN APID DEPTH PMI SPOOL COMMAND...` under Hydra, with PALS's variables.

What Hydra alone sets is removed, so that a rank cannot take it for PALS's. The
rank's exit code goes into SPOOL/rank.R, as Hydra only hands on all codes ORed;
a signal is a negative number there.
"""

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path

_OF_HYDRA = ("MPI_LOCAL", "HYDI_", "HYDRA_", "PMI_HOSTNAME", "GFORTRAN_UNBUFFERED")


def main() -> None:
    ppn, apid, depth, pmi, spool, *command = sys.argv[1:]
    rank, size = int(os.environ["PMI_RANK"]), int(os.environ["PMI_SIZE"])
    node, local_rank = divmod(rank, int(ppn))
    local_size = min(int(ppn), size - node * int(ppn))
    environment = {k: v for k, v in os.environ.items() if not k.startswith(_OF_HYDRA)}
    environment |= {
        "PALS_APID": apid,
        "PALS_DEPTH": depth,
        "PALS_LOCAL_RANKID": str(local_rank),
        "PALS_LOCAL_SIZE": str(local_size),
        "PALS_NODEID": str(node),
        "PALS_RANKID": str(rank),
        "PALS_SPOOL_DIR": spool,
    }
    if pmi == "cray":
        environment |= {"PMI_LOCAL_RANK": str(local_rank), "PMI_LOCAL_SIZE": str(local_size)}
    else:  # without PMIX_NAMESPACE: MPICH aborts where it finds that beside PMI_SIZE
        environment |= {"PALS_PMI": "pmix", "PMIX_RANK": str(rank)}
    # Hydra gives a signal to the rank's whole process group: the program has got it already.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda sent, frame: None)
    try:
        # Everything inherited: MPI talks to Hydra over PMI_FD.
        program = subprocess.Popen(
            command, env=environment, close_fds=False, preexec_fn=die_with_parent, restore_signals=True
        )
    except OSError as error:
        sys.stderr.write(f"execve failed: {command[0]}: {error.strerror}\n")
        leave(Path(spool) / f"rank.{rank}", 127)
    code = program.wait()
    leave(Path(spool) / f"rank.{rank}", code)


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG


def leave(file: Path, code: int) -> None:
    new = file.with_name(f"new.{file.name}")
    new.write_text(str(code))
    new.replace(file)
    sys.exit(code if code >= 0 else 128 - code)


main()
