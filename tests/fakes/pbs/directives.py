"""The parser for PBS directives of the stand-in that `ddp-hpc rehearse` uses."""

from ddp_hpc.rehearse.pbs.directives import directive_lines

__all__ = ["directive_lines"]
