"""Runs a user's script on ranks of `Forks`."""

import runpy
import sys


def main(argv: list[str]) -> None:
    sys.argv = argv
    runpy.run_path(argv[0], run_name="__main__")
    sys.exit(0)
