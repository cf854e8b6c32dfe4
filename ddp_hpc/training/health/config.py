"""Options that control when a rank is reported as hung or slow."""

from __future__ import annotations

from dataclasses import dataclass

from ddp_hpc.base.options import check_values, option


@dataclass(frozen=True, kw_only=True)
class HealthConfig:
    """The time limits after which a rank is reported as hung or slow.

    Raises:
        RequestError: a value is out of range.
    """

    hang_timeout_s: float = option(
        600.0,
        "Seconds without progress after which the job stops with an error that names the hanging rank.",
        flag="--hang-timeout",
        argument="hang_timeout_s",
        above=0,
    )
    skew_limit: float = option(
        1.5, "Report a rank if it is slower than the other ranks by this factor.", above=1
    )

    def __post_init__(self) -> None:
        check_values(self)
