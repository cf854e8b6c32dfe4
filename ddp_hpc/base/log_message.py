"""Messages as records of the logger `ddp_hpc`, for programs that have added a handler to this logger.

Without a handler, every message is printed. The root logger's handlers are not used: by default, the root
logger drops messages below WARNING.
"""

from __future__ import annotations

import sys


def log_message(text: str) -> bool:
    """Logs `text` and returns True if the logger `ddp_hpc` has handlers; otherwise the caller must print it.

    The level is ERROR or WARNING if the text begins with that word after its prefix, otherwise INFO.
    """
    logging = sys.modules.get("logging")  # importing logging would slow down commands that need no logger
    if logging is None or not logging.getLogger("ddp_hpc").handlers:
        return False
    begin = text.partition("] ")[2] if text.startswith("[") else text
    level = next((name for name in ("ERROR", "WARNING") if begin.lower().startswith(name.lower())), "INFO")
    logging.getLogger("ddp_hpc").log(getattr(logging, level), "%s", text)
    return True
