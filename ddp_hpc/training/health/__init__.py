"""Monitors a run and ends it: heartbeats, preemption, failures of ranks, and shutdown."""
