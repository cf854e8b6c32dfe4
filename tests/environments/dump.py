"""A rank that only writes its environment to a file: `dump.py DIRECTORY`."""

import os
import socket
import sys
from pathlib import Path

# The file is renamed when it is complete, because the recorder counts the files.
path = Path(sys.argv[1]) / f"{socket.gethostname()}-{os.getpid()}"
unfinished = path.with_suffix(".part")
unfinished.write_text("\0".join(f"{name}={value}" for name, value in os.environ.items()))
unfinished.rename(path)
