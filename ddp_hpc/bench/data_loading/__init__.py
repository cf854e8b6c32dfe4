"""`ddp-hpc bench io`: the time to read a batch, for each file format."""
