"""How PBS reads directives, from the stand-in that is part of the program."""

from ddp_hpc.rehearse.pbs.directives import directive_lines

__all__ = ["directive_lines"]
