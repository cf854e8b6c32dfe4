"""A job script run on one machine, with stand-ins for the scheduler and the launcher.

The stand-ins are programs of their own, which a job finds on its PATH: pbs/, slurm/ and
launchers/ import nothing but the standard library and each other. session.py is what a user
asks for.
"""
