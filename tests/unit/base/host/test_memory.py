from __future__ import annotations

import gc
import resource
import sys

import pytest
from tests.support.commands import run_command

from paceline.base.host.memory import limited_private_memory, own_memory, permanent_objects

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


def test_larger_allocations_fail_and_the_limit_ends():
    before = resource.getrlimit(resource.RLIMIT_DATA)
    # The peak may be that of an earlier test, far above what is in use now.
    limit_bytes = own_memory().peak_private_bytes + 64 * MIB
    with limited_private_memory(limit_bytes), pytest.raises(MemoryError):
        bytearray(limit_bytes)
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
    assert len(bytearray(16 * MIB)) == 16 * MIB


FULL = """
import resource, threading
from paceline.base.host.memory import limited_private_memory
with limited_private_memory(32 * 2**20):
    kept = []
    size = 2**20
    while size > 16:
        try:
            kept.append(bytearray(size))
        except MemoryError:
            size //= 2
    ended = []
    thread = threading.Thread(target=lambda: ended.append(True))
    thread.start()
    thread.join()
    assert resource.getrlimit(resource.RLIMIT_DATA)[0] != resource.RLIM_INFINITY
kept.clear()
print(ended, threading.Thread.start.__name__)
"""


def test_a_thread_starts_also_where_the_limit_leaves_no_memory():
    """Otherwise `start` fails, or waits for ever for a thread that could not say that it runs."""
    run = run_command([sys.executable, "-c", FULL], 60)
    assert (run.returncode, run.stdout) == (0, "[True] start\n"), run.stderr


def test_collector_ignores_what_was_made_meanwhile_and_works_again():
    with permanent_objects():
        assert not gc.isenabled()
        made = []
    assert gc.isenabled()
    assert not any(each is made for each in gc.get_objects())


def test_collector_works_again_after_an_error():
    with pytest.raises(ImportError), permanent_objects():
        raise ImportError
    assert gc.isenabled()
