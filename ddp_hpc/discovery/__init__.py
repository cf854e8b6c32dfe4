"""Detects the rank, world size and node of this process from its environment, before torch is imported."""
