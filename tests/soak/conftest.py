"""Fixtures of the functional tests, for repetitions of them."""

from tests.functional.conftest import cache, paceline

__all__ = ["cache", "paceline"]
