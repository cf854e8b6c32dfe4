"""`ddp-hpc bench comm`: collectives, timed and verified."""
