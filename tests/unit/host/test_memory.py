from __future__ import annotations

import resource

import pytest

from paceline.host.memory import available_bytes, limited_private_memory, own_memory

MIB = 2**20
STATUS = """\
Name:	python
VmHWM:	  400 kB
RssAnon:	  200 kB
RssFile:	   90 kB
RssShmem:	   30 kB
VmData:	  500 kB
"""


def test_files_and_shared_memory_are_not_private(tmp_path):
    (tmp_path / "status").write_text(STATUS)
    (tmp_path / "smaps_rollup").write_text("0-1 ---p 0 00:00 0 [rollup]\nPss_Shmem:    15 kB\n")
    found = own_memory(tmp_path)
    assert found.peak_private_bytes == 280 * 1024
    assert found.shared_bytes == 15 * 1024


def test_available_memory_is_that_of_the_kernel(tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal:  9000 kB\nMemAvailable:  700 kB\nHugePages: 0\n")
    assert available_bytes(tmp_path / "meminfo") == 700 * 1024


def test_larger_allocations_fail_and_the_limit_ends():
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with (
        limited_private_memory(own_memory().peak_private_bytes + 64 * MIB),
        pytest.raises(MemoryError),
    ):
        bytearray(512 * MIB)
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
    assert len(bytearray(16 * MIB)) == 16 * MIB
