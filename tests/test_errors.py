"""The text of errors with causes."""

from __future__ import annotations

from ddp_hpc.base.errors import DdpHpcError


def test_a_cause_follows_the_message_without_its_full_stop() -> None:
    error = DdpHpcError("the request was lost. Check whether the job is queued.")
    error.__cause__ = OSError("no answer")
    assert str(error) == "the request was lost. Check whether the job is queued: no answer"
