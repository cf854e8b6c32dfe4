"""The phases of the start of a rank, which its heartbeat reports."""

from __future__ import annotations

IMPORTING = "importing torch"
CHOOSING = "choosing a device"
CONNECTING = "connecting the process group"
PREPARING = "preparing the data and the model"
STARTING = "start"
START_PHASES = (IMPORTING, CHOOSING, CONNECTING, PREPARING, STARTING)
"""The phases before the first step, in their order."""
UNCONNECTED = (IMPORTING, CHOOSING, CONNECTING)
"""The phases until the process group is connected, in which another time limit applies."""
