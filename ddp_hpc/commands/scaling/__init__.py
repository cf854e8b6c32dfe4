"""The command `ddp-hpc bench scaling`, which runs points here or as jobs, and gathers their results."""
