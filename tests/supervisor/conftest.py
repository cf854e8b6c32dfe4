"""The sandbox of the tests for job scripts."""

from __future__ import annotations

from tests.batch.conftest import nothing_set, sandbox

__all__ = ["nothing_set", "sandbox"]
