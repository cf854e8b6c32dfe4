"""Runs a job script on one machine, with stand-ins for the scheduler and the launcher.

The stand-ins are separate programs on the PATH of the job. Those of launchers are in `launchers/`, and those
of a scheduler in `slurm/` and `pbs/`. `run_rehearsal.rehearse` runs a complete rehearsal.
"""
