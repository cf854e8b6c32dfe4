"""A stand-in for Slurm: one directory, no daemons. Its limits: docs/how-to/rehearse.md."""
