"""Run a job script on one machine, with stand-ins for the scheduler and the launcher.

The stand-ins are separate programs on the PATH of the job. pbs/, slurm/ and launchers/ import only
the standard library and each other. `session.rehearse` runs a complete rehearsal.
"""
