"""The health of a run: heartbeats, preemption, failures of ranks, and how a run ends."""
