from __future__ import annotations

import gc
import os
import resource
import sys
import tempfile

import pytest
from tests.support.commands import run_command

from paceline.base.host.memory import (
    drop_cached_pages,
    limited_private_memory,
    own_memory,
    permanent_objects,
)

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


def cached_bytes(file):
    """The pages of a file in memory, by a program of util-linux."""
    found = run_command(["fincore", "--bytes", "--noheadings", "--output", "RES", file], 20)
    return int(found.stdout)


def test_pages_of_a_file_leave_the_memory(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(os.urandom(MIB + 5))
    if run_command(["stat", "-f", "-c", "%T", tmp_path], 20).stdout.strip() == "tmpfs":
        pytest.skip("files of a tmpfs are memory")
    assert cached_bytes(file) > MIB
    assert drop_cached_pages(file) == 0
    assert cached_bytes(file) == 0
    assert len(file.read_bytes()) == MIB + 5
    assert cached_bytes(file) > MIB


def test_pages_that_stay_are_counted():
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        file.write(bytes(MIB))
        file.flush()
        assert drop_cached_pages(file.name) == MIB


def test_empty_file_has_no_pages(tmp_path):
    (tmp_path / "file").touch()
    assert drop_cached_pages(tmp_path / "file") == 0
    with pytest.raises(FileNotFoundError):
        drop_cached_pages(tmp_path / "none")
