"""Checks of PBS and Slurm job scripts. Scripts are parsed, never run."""
