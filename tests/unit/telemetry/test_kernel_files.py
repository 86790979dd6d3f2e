"""Files as the kernel serves them: read anew each time, in parts, or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.telemetry.kernel_files import KernelFile, number_after


def test_each_reading_sees_what_the_file_says_then(tmp_path: Path) -> None:
    path = tmp_path / "counter"
    path.write_text("1\n")
    file = KernelFile(path)
    assert file.read() == b"1\n"
    path.write_text("22\n")
    assert file.read() == b"22\n"


def test_file_of_many_pages_is_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "long"
    path.write_bytes(b"0123456789" * 30_000)
    assert KernelFile(path).read() == b"0123456789" * 30_000


def test_missing_file_is_empty_until_it_is_there(tmp_path: Path) -> None:
    file = KernelFile(tmp_path / "late")
    assert file.read() == b""
    (tmp_path / "late").write_text("now")
    assert file.read() == b"now"


def test_what_the_kernel_declines_to_tell_is_empty(tmp_path: Path) -> None:
    assert KernelFile(tmp_path).read() == b""  # a folder: EISDIR, as /proc/pressure's EOPNOTSUPP


def test_closed_files_leave_no_descriptor(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a")
    before = set(Path("/proc/self/fd").iterdir())
    file = KernelFile(tmp_path / "a")
    file.read()
    dropped = KernelFile(tmp_path / "a")
    dropped.read()
    file.close()
    del dropped
    assert set(Path("/proc/self/fd").iterdir()) == before


@pytest.mark.parametrize(
    ("content", "label", "expected"),
    [
        (b"MemTotal:       16 kB\nMemFree: 3 kB\n", b"MemTotal:", 16),
        (b"MemTotal:       16 kB\nMemFree: 3 kB\n", b"MemFree:", 3),
        (b"HighTotal: 5 kB\n", b"Total:", None),  # not at the start of a line
        (b"a x\n", b"a ", None),
        (b"a ", b"a ", None),
        (b"77\n", b"", 77),
        (b"", b"", None),
    ],
)
def test_number_is_that_of_the_line_with_the_label(
    content: bytes, label: bytes, expected: int | None
) -> None:
    assert number_after(content, label) == expected
