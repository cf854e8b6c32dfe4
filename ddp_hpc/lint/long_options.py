"""Long options of sbatch and srun that are written with one dash."""

from __future__ import annotations

from ddp_hpc.lint.check_registry import nearest_known, plain
from ddp_hpc.schedulers.script_options import ReadOption
from ddp_hpc.schedulers.slurm.sbatch_options import CURRENT, find_option


def with_two_dashes(d: ReadOption) -> str:
    """Returns how to write a long option that has only one dash; empty if it is another option."""
    name, equals, value = d.written[1:].partition("=")
    name = name.partition(" ")[0]
    is_long = len(name) > 2 and not isinstance(find_option(name), tuple)
    value = "VALUE" if len(d.written) > 80 and equals else value  # a message would cut it
    return f"write --{plain(name + equals + value)}, with two dashes" if is_long else ""


def long_name(flag: str) -> str:
    """Returns the name of a long option as sbatch writes it, without a value after a colon."""
    return flag[2:82].lower().replace("_", "-").partition(":")[0]


def near_option(flag: str) -> str:
    """Returns the option of sbatch that is nearest to an unknown long option; empty if none is similar."""
    name = long_name(flag)
    if not flag.startswith("--") or find_option(name) != ():
        return ""
    near = nearest_known([name], CURRENT, cutoff=0.75).get(name)
    return f"--{near}" if near else ""
