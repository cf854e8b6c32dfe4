"""Detection of the rank of a process and its node from the launcher's environment, before torch starts."""
