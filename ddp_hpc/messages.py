"""Messages as records of the logger `ddp_hpc`, for programs that have given it a handler.

Without one, every message is printed as before: a batch log has no use for time stamps on each line, and a
handler of the root logger, such as that of `logging.basicConfig()`, would drop what is not a warning.
"""

from __future__ import annotations

import sys


def log_message(text: str) -> bool:
    """Logs `text` if the logger `ddp_hpc` has handlers; False if it has none and the caller must print.

    The level is ERROR or WARNING for a text that says so, otherwise INFO.
    """
    logging = sys.modules.get("logging")  # importing it would slow down commands that need no logger
    if logging is None or not logging.getLogger("ddp_hpc").handlers:
        return False
    begin = text.partition("] ")[2] if text.startswith("[") else text
    level = next((name for name in ("ERROR", "WARNING") if begin.lower().startswith(name.lower())), "INFO")
    logging.getLogger("ddp_hpc").log(getattr(logging, level), "%s", text)
    return True
