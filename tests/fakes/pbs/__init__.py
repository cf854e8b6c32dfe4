"""What tests take from the stand-in for OpenPBS, ddp_hpc/rehearse/pbs."""
