"""Stand-in for `apptainer exec [--nv] IMAGE COMMAND...`, where IMAGE is a directory (a sandbox).

As in the Apptainer user guide (environment_and_metadata.rst), the program has the environment of the host,
but PATH is that of the image, LD_LIBRARY_PATH is not passed, and APPTAINER_CONTAINER is the image. The
command must be in the image. The file system is that of the host.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path


def main(argv: list[str]) -> None:
    if argv[:1] != ["exec"]:
        sys.exit(f"this stand-in has no command {argv[:1]}")
    options = [word for word in argv[1:3] if word.startswith("-")]
    if options not in ([], ["--nv"]):
        sys.exit(f"this stand-in has no options {options}")
    image, *command = argv[1 + len(options) :]
    if not Path(image).is_dir():
        print(f"FATAL:   could not open image {Path(image).absolute()}: no such file", file=sys.stderr)
        sys.exit(255)
    path = f"{Path(image).absolute()}/bin"
    program = shutil.which(command[0], path=path)
    if program is None:
        print(f'FATAL:   "{command[0]}": executable file not found in $PATH', file=sys.stderr)
        sys.exit(255)
    environ = {**os.environ, "PATH": path, "APPTAINER_CONTAINER": str(Path(image).absolute())}
    environ.pop("LD_LIBRARY_PATH", None)
    os.execve(program, command, environ)


if __name__ == "__main__":
    main(sys.argv[1:])
