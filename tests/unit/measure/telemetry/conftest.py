"""Fixtures of the tests of telemetry."""

from tests.unit.measure.telemetry.fake_processes import table

__all__ = ["table"]
