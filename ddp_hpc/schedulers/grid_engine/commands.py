"""The commands of Grid Engine on a login node."""

from __future__ import annotations

from ddp_hpc.schedulers.commands import Commands


class GridEngineCommands(Commands):
    """Submits jobs to Grid Engine and asks about them."""

    def array_options(self, index: str) -> list[str]:
        return ["-t", index]


ROLE = GridEngineCommands
