"""The PBS server of the stand-in that `ddp-hpc rehearse` uses."""

from ddp_hpc.rehearse.pbs.server import Settings

__all__ = ["Settings"]
