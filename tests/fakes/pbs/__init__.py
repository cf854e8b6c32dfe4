"""Parts of the stand-in for OpenPBS, ddp_hpc/rehearse/pbs, that tests use."""
