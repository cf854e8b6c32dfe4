"""Starts the commands and the daemons of the stand-ins, without Python's environment variables.

The generated command lines name this module because a daemon or a command of a stand-in must not depend on
the PATH, PYTHONPATH or virtual environment of the job.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from ddp_hpc.base import process_control
from ddp_hpc.rehearse.launchers.options import RefusedError

PYTHON_OPTIONS = ("-I", "-c")
# The first argument is the parent directory of the package.
CODE = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); "
    "from ddp_hpc.rehearse import start_stand_in; start_stand_in.{what}()"
)


def command() -> NoReturn:
    """Runs `main` of a command's module. The arguments are the module, the machine's directory and options.

    If the command refuses a request, its message is printed to stderr.
    """
    module, root, *argv = sys.argv[1:]
    try:
        sys.exit(import_module(module).main(argv, dict(os.environ), Path(root)))
    except RefusedError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(error.exit_code)


def daemon() -> None:
    """Runs a job with the class DAEMON of a module. The arguments are module, directory and job number."""
    module, root, number = sys.argv[1:]
    process_control.adopt_orphans()  # the daemon can then end all processes of the job
    import_module(module).DAEMON(Path(root), int(number)).run()
