"""A stand-in for Slurm: one folder, no daemons, the jobs run here. What it does not do: docs/rehearse.md."""
