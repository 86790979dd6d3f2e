"""Memory and paging from texts of /proc/meminfo and /proc/vmstat."""

from __future__ import annotations

from paceline.telemetry.memory import (
    MemoryReading,
    PagingReading,
    parse_memory,
    parse_paging,
)

MEMINFO = b"""MemTotal:       1000 kB
MemFree:         200 kB
MemAvailable:    600 kB
Buffers:          50 kB
Cached:          300 kB
SwapCached:        7 kB
SwapTotal:        80 kB
SwapFree:         30 kB
"""


def test_used_is_what_cannot_be_had_without_swapping() -> None:
    assert parse_memory(MEMINFO) == MemoryReading(
        ram_used_bytes=400 * 1024,
        ram_total_bytes=1000 * 1024,
        swap_used_bytes=50 * 1024,
        swap_total_bytes=80 * 1024,
    )


def test_available_memory_is_estimated_where_the_kernel_does_not_say() -> None:
    old = MEMINFO.replace(b"MemAvailable:    600 kB\n", b"")
    assert parse_memory(old).ram_used_bytes == (1000 - 200 - 50 - 300) * 1024


def test_system_that_does_not_speak_of_swap_has_none_used() -> None:
    reading = parse_memory(b"MemTotal: 2 kB\nMemAvailable: 1 kB\n")
    assert (reading.swap_used_bytes, reading.swap_total_bytes) == (0, None)


def test_minor_faults_are_all_but_the_major_ones() -> None:
    vmstat = b"nr_free_pages 9\npswpin 3\npswpout 4\npgfault 100\npgmajfault 30\n"
    assert parse_paging(vmstat, page_bytes=4096) == PagingReading(
        swapped_in_bytes=3 * 4096,
        swapped_out_bytes=4 * 4096,
        minor_page_faults=70,
        major_page_faults=30,
    )


def test_paging_that_is_not_told_is_missing() -> None:
    assert parse_paging(b"") == PagingReading(
        swapped_in_bytes=None,
        swapped_out_bytes=None,
        minor_page_faults=None,
        major_page_faults=None,
    )
