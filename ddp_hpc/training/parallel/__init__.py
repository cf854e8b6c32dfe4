"""Parallelization strategies, one class each. The training loop uses only their base class, `Strategy`."""
