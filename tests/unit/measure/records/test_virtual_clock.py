"""The clock of a host that takes turns."""

from __future__ import annotations

import pytest

from paceline.base.errors import DataError
from paceline.measure.records.virtual_clock import (
    Slice,
    VirtualClock,
    header,
    line,
    overlap_ns,
    read_clocks,
)

MS = 1_000_000


def clock(*slices_ms: tuple[int, int]) -> VirtualClock:
    return VirtualClock([Slice(start * MS, end * MS) for start, end in slices_ms])


@pytest.mark.parametrize(
    ("moment_ms", "ran_ms"),
    [(0, 0), (4, 4), (10, 10), (15, 10), (20, 10), (25, 15), (30, 20), (39, 20), (45, 25)],
)
def test_clock_stands_still_while_the_host_is_frozen(moment_ms, ran_ms):
    found = clock((0, 10), (20, 30), (40, 50)).virtual_s(moment_ms / 1000)
    assert found == pytest.approx(ran_ms / 1000, abs=1e-9)


def test_duration_counts_what_the_host_ran_and_rounds_its_slices():
    host = clock((0, 10), (20, 30), (40, 50))
    assert host.duration_s(0.005, 0.045) == pytest.approx(0.020, abs=1e-9)
    assert host.slices_between(0.005, 0.045) == 2


def test_step_of_too_few_rounds_is_refused():
    host = clock(*((start, start + 10) for start in range(0, 500, 20)))
    assert host.step_s(0.005, 0.4) == pytest.approx(0.2, abs=1e-9)
    with pytest.raises(DataError, match="at least 20 rounds of slices in it, found 19"):
        host.step_s(0.005, 0.38)


@pytest.mark.parametrize("moment_s", [0.099, 0.161])
def test_times_without_turns_have_no_virtual_time(moment_s):
    with pytest.raises(DataError, match="between the first and the last slice"):
        clock((100, 110), (120, 130), (140, 150)).virtual_s(moment_s)


def test_frozen_time_after_the_last_slice_belongs_to_the_record():
    assert clock((0, 10), (20, 30)).virtual_s(0.035) == pytest.approx(0.020, abs=1e-9)


def test_no_slice_means_no_virtual_time():
    with pytest.raises(DataError):
        clock().virtual_s(0.0)


def test_slices_in_disorder_are_refused():
    with pytest.raises(DataError, match="in order"):
        clock((0, 10), (5, 20))


def test_file_is_read_for_each_host_without_its_unfinished_line(tmp_path):
    path = tmp_path / "slices"
    rows = [line(0, Slice(0, 10)), line(1, Slice(11, 20)), line(0, Slice(21, 30)), "1 31"]
    path.write_text(header(1000, 2, 10) + "".join(rows))
    clocks = read_clocks(path)
    assert clocks[0].slices == [Slice(1000, 1010), Slice(1021, 1030)]
    assert clocks[1].slices == [Slice(1011, 1020)]
    assert overlap_ns(clocks.values()) == 0


@pytest.mark.parametrize(
    "text", ["", "\n", "something\n", "slices unix_offset_ns=1 hosts=1\n0 x y\n"]
)
def test_other_files_are_refused(tmp_path, text):
    path = tmp_path / "slices"
    path.write_text(text)
    with pytest.raises(DataError, match="expected the slices of a lab"):
        read_clocks(path)


def test_overlap_of_hosts_is_counted():
    assert overlap_ns([clock((0, 10), (20, 30)), clock((8, 22))]) == 4 * MS
