"""The PBS server of the stand-in that `ddp-hpc rehearse` uses."""

from ddp_hpc.schedulers.pbs.stand_in.server import Settings

__all__ = ["Settings"]
