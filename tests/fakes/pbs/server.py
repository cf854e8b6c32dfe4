"""The stand-in's server, which is part of the program: `ddp-hpc rehearse` runs jobs by it too."""

from ddp_hpc.rehearse.pbs.server import Settings

__all__ = ["Settings"]
