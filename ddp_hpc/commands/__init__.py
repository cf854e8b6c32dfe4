"""One module for each command of `ddp-hpc`: its click options, and the call of the code that implements
it.
"""
