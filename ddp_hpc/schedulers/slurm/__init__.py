"""Support for Slurm."""
