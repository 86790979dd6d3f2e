"""Peak memory where the proportional set size is read on few ticks."""

from __future__ import annotations

import polars as pl
import pytest

from paceline.analysis.trial.usage import _memory_peak


def ticks(*sizes: tuple[int, int | None]) -> pl.DataFrame:
    """Rows of (resident, proportional) bytes, one per second."""
    rows = [(float(second), rss, pss) for second, (rss, pss) in enumerate(sizes)]
    schema = {"unix_s": pl.Float64, "run_rss_bytes": pl.Int64, "run_pss_bytes": pl.Int64}
    return pl.DataFrame(rows, schema=schema, orient="row")


def test_peak_between_two_readings_has_the_share_of_the_nearest_reading():
    host = ticks((100, None), (200, 150), (400, None), (300, None), (100, 90))
    assert _memory_peak([host]) == (300, "pss")


def test_reading_without_a_process_is_ignored():
    assert _memory_peak([ticks((400, None), (0, 0))]) == (400, "rss")


@pytest.mark.parametrize(
    ("second", "peak"),
    [(ticks((10, 5)), (305, "pss")), (ticks((10, None)), (410, "rss"))],
)
def test_hosts_are_added_up_in_one_kind(second, peak):
    assert _memory_peak([ticks((200, 150), (400, None)), second]) == peak
