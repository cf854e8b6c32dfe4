"""Checks of PBS, Slurm and LSF job scripts. Scripts are parsed, never run."""
