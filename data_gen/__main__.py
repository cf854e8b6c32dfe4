"""`python -m data_gen` writes a data file; `python -m data_gen --help` tells the rest."""

from data_gen.cli import main

if __name__ == "__main__":
    main()
