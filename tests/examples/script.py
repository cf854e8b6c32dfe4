"""Runs a user's script, on ranks of `Forks` or of a launcher."""

import runpy
import sys


def main(argv: list[str]) -> None:
    sys.argv = argv
    runpy.run_path(argv[0], run_name="__main__")
    sys.exit(0)


if __name__ == "__main__":
    import tests.gloo_exit  # noqa: F401 - for the examples that do not use ddp-hpc

    main(sys.argv[1:])
