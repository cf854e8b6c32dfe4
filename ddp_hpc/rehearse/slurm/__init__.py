"""A stand-in for Slurm in one directory, without daemons. docs/how-to/rehearse.md lists its limits."""
