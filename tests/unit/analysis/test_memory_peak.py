"""The peak of memory, where the proportional set size is read on few ticks."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from paceline.analysis.usage import _memory_peak
from paceline.records.rows import HostSample


def ticks(*sizes: tuple[int, int | None]) -> tuple[HostSample, ...]:
    """(resident, proportional) bytes, one a second; the rest says nothing."""
    empty: dict[str, Any] = {
        field.name: None for field in fields(HostSample) if field.name.startswith(("cpu_", "run_"))
    }
    others: dict[str, Any] = dict.fromkeys(
        (
            "iowait_valid", "ram_used_bytes", "ram_total_bytes", "swap_used_bytes",
            "disk_read_bytes", "disk_write_bytes", "network_sent_bytes", "network_received_bytes",
            "sidecar_cpu_seconds", "sidecar_rss_bytes",
        ),
        0,
    )  # fmt: skip
    return tuple(
        HostSample(
            **{**empty, **others, "unix_s": second, "run_rss_bytes": rss, "run_pss_bytes": pss}
        )
        for second, (rss, pss) in enumerate(sizes)
    )


def test_peak_between_two_readings_is_as_proportional_as_at_the_nearest():
    host = ticks((100, None), (200, 150), (400, None), (300, None), (100, 90))
    assert _memory_peak([host]) == (300, "pss")


def test_reading_of_no_process_says_nothing():
    assert _memory_peak([ticks((400, None), (0, 0))]) == (400, "rss")


@pytest.mark.parametrize(
    ("second", "peak"),
    [(ticks((10, 5)), (305, "pss")), (ticks((10, None)), (410, "rss"))],
)
def test_hosts_are_added_up_in_one_kind(second, peak):
    assert _memory_peak([ticks((200, 150), (400, None)), second]) == peak
