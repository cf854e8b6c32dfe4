"""Parts of the stand-in for OpenPBS, ddp_hpc/schedulers/pbs/stand_in, that tests use."""
