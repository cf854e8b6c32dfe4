"""Runs a job script on one machine, with stand-ins for the scheduler and the launcher.

The stand-ins are separate programs on the PATH of the job. Those of launchers are in `launchers/`, and those
of a scheduler in `slurm/` and `pbs/`. They import only the standard library, each other and the
table of options of sbatch. `run_rehearsal.rehearse` runs a complete rehearsal.
"""
