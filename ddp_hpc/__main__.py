"""Entry point of `python -m ddp_hpc`, which runs the program `ddp-hpc`."""

from ddp_hpc.cli import main

if __name__ == "__main__":
    main()
