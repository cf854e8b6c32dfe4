"""Runs `ddp-hpc` as `python -m ddp_hpc`."""

from ddp_hpc.cli import main

if __name__ == "__main__":
    main()
