"""`ddp-hpc bench scaling`: weak and strong scaling over numbers of ranks."""
