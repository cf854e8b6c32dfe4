"""Runs `ddp_hpc.train` with gloo, but with the TCPStore clients that GPU backends use."""

from ddp_hpc.train import main
from ddp_hpc.training.process_group import group_store

group_store._OWN_STORE_BACKENDS = ()

if __name__ == "__main__":
    main()
