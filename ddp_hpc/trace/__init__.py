"""Reads the traces of all ranks, and reports where the time was spent."""
