"""Stand-ins for launchers of ranks, over MPICH's Hydra. What they do not do: docs/how-to/rehearse.md."""
