"""Detection of this process's rank, world size and node from its environment, before torch is imported."""
