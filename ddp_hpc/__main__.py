"""`python -m ddp_hpc` is `ddp-hpc`."""

from ddp_hpc.cli import main

if __name__ == "__main__":
    main()
