"""Measures the time of `ddp-hpc render` and `--help` relative to the import of click and jinja2.

The goal is at most 1.3 for both.

python benchmarks/cli_start.py [--runs 30]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time

IMPORTS = [sys.executable, "-c", "import click, jinja2"]
HELP = [sys.executable, "-m", "ddp_hpc", "--help"]
RENDER = [sys.executable, "-m", "ddp_hpc", "render", "--profile", "polaris", "--nodes", "2"]


def median_s(commands: dict[str, list[str]], runs: int) -> dict[str, float]:
    """Returns the median wall time of each command. They run in turns, so that other load affects all."""
    # An installed package has compiled files; without them, this would measure the compiler.
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    taken: dict[str, list[float]] = {name: [] for name in commands}
    for turn in range(runs + 1):
        for name, argv in commands.items():
            start = time.perf_counter()
            subprocess.run(argv, check=True, capture_output=True, env=environ)
            if turn:  # the first run fills the file cache
                taken[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=30)
    times = median_s({"imports": IMPORTS, "render": RENDER, "help": HELP}, parser.parse_args().runs)
    print(f"import click, jinja2   {times['imports'] * 1e3:6.1f} ms")
    for name in ("render", "help"):
        ratio = times[name] / times["imports"]
        print(f"{name:<22} {times[name] * 1e3:6.1f} ms  {ratio:.2f} times the imports")


if __name__ == "__main__":
    main()
