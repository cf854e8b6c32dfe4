"""`ddp-hpc bench io`: the time to load a batch from each file format."""
