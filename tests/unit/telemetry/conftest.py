"""Fixtures of the tests of telemetry."""

from tests.unit.telemetry.fake_processes import table

__all__ = ["table"]
