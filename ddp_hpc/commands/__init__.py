"""One module for each command of `ddp-hpc`: what click needs, and the call of the code behind it."""
