"""Snapshots (checkpoints): the state of a run, and the directory that holds it."""
