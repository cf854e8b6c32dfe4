"""Which rank a process is and where it runs, read from the launcher's environment before torch starts."""
