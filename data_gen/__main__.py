"""Entry point of `python -m data_gen`."""

from data_gen.cli import main

if __name__ == "__main__":
    main()
