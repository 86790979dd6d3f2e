"""Memory, swap and page faults of a host, from /proc/meminfo and /proc/vmstat."""

from __future__ import annotations

import os
from dataclasses import dataclass

from paceline.telemetry.kernel_files import number_after


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReading:
    """Bytes; None where the kernel does not say."""

    ram_used_bytes: int  # total - available: what cannot be had without swapping
    ram_total_bytes: int
    swap_used_bytes: int
    swap_total_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PagingReading:
    """Since boot; None where the kernel does not say."""

    swapped_in_bytes: int | None
    swapped_out_bytes: int | None
    minor_page_faults: int | None
    major_page_faults: int | None


def parse_memory(meminfo: bytes) -> MemoryReading:
    """From the text of /proc/meminfo (proc_meminfo(5)), whose kB are 1024 bytes."""
    total = _kibibytes(meminfo, b"MemTotal:") or 0
    available = _kibibytes(meminfo, b"MemAvailable:")
    if available is None:  # kernels before 3.14, and emulated ones
        parts = (_kibibytes(meminfo, name) or 0 for name in (b"MemFree:", b"Buffers:", b"Cached:"))
        available = sum(parts)
    swap_total = _kibibytes(meminfo, b"SwapTotal:")
    swap_free = _kibibytes(meminfo, b"SwapFree:") or 0
    return MemoryReading(
        ram_used_bytes=max(0, total - available),
        ram_total_bytes=total,
        swap_used_bytes=max(0, (swap_total or 0) - swap_free),
        swap_total_bytes=swap_total,
    )


def parse_paging(vmstat: bytes, page_bytes: int | None = None) -> PagingReading:
    """From the text of /proc/vmstat; its `pgfault` counts the major faults too."""
    page_bytes = page_bytes or os.sysconf("SC_PAGE_SIZE")
    faults, major = number_after(vmstat, b"pgfault "), number_after(vmstat, b"pgmajfault ")
    pages_in, pages_out = number_after(vmstat, b"pswpin "), number_after(vmstat, b"pswpout ")
    return PagingReading(
        swapped_in_bytes=None if pages_in is None else pages_in * page_bytes,
        swapped_out_bytes=None if pages_out is None else pages_out * page_bytes,
        minor_page_faults=None if faults is None else faults - (major or 0),
        major_page_faults=major,
    )


def _kibibytes(meminfo: bytes, label: bytes) -> int | None:
    size = number_after(meminfo, label)
    return None if size is None else size * 1024
