"""Stand-ins for MPI launchers, based on MPICH's Hydra. docs/how-to/rehearse.md lists their limits."""
