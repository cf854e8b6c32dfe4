"""The training that `python -m ddp_hpc.train` runs. All modules of this package may import torch."""
