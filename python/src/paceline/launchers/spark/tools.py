"""Checks of `paceline doctor` for Spark."""

from __future__ import annotations

from paceline.host.spark import find_java_for_spark, find_spark
from paceline.host.tools import Finding, tool_finding


def checks() -> list[Finding]:
    """Return what `paceline doctor` shows about this launcher."""
    return [tool_finding("Java", find_java_for_spark), tool_finding("Spark", find_spark)]
