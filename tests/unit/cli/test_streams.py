"""Commands write in every locale, and without a standard output."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.base.host import cleaner, exec_guarded
from paceline.cli.streams import _PLAIN

_PROGRAM = r"""
from paceline.cli.streams import make_streams_usable
make_streams_usable()
print("step 5 \u00b5s \u2026 \u00b7 \u2248 \u4e2d \udcff")
"""


def said(**environment: str) -> bytes:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        env={"PATH": os.environ["PATH"], "PYTHONUTF8": "0", **environment},
        capture_output=True, check=True, timeout=60,
    )  # fmt: skip
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("encoding", "expected"),
    [
        ("utf-8", "step 5 µs … · ≈ 中 ".encode() + b"\xff"),
        ("ascii", b"step 5 us ... - ~ \\u4e2d \xff"),
        ("iso-8859-1", b"step 5 \xb5s ... \xb7 ~ \\u4e2d \xff"),
    ],
)
def test_nothing_is_lost_in_any_encoding(encoding: str, expected: bytes) -> None:
    assert said(PYTHONIOENCODING=encoding) == expected


def test_no_coercion_of_the_locale_is_needed() -> None:
    assert said(LC_ALL="POSIX", PYTHONCOERCECLOCALE="0") == b"step 5 us ... - ~ \\u4e2d \xff"


def test_help_is_ascii_where_the_encoding_is() -> None:
    """click takes a stream of ASCII for a mistake, and writes UTF-8 into it."""
    done = subprocess.run(
        [sys.executable, "-m", "paceline.cli", "run", "--help"],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True, check=True, timeout=60,
    )  # fmt: skip
    assert done.stdout.isascii()
    assert b"..." in done.stdout


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_no_file_gets_the_number_of_a_closed_stream(closed: str, tmp_path: Path) -> None:
    """Otherwise it gets the output of a library or of another program."""
    program = (
        "import os\nfrom paceline.cli.streams import make_streams_usable\nmake_streams_usable()\n"
        f"file = open({str(tmp_path / 'mine')!r}, 'w')\nfile.write('kept'); file.flush()\n"
        "os.system('echo printed; echo printed >&2')\nos.write(1, b'x'); os.write(2, b'x')\n"
    )
    command = ["sh", "-c", f'"$@" {closed}', "sh", sys.executable, "-c", program]
    subprocess.run(command, capture_output=True, check=True, timeout=60)
    assert (tmp_path / "mine").read_text() == "kept"


def test_plain_forms_are_ascii() -> None:
    assert all(len(each) == 1 and plain.isascii() for each, plain in _PLAIN.items())


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_a_closed_stream_is_no_error(closed: str) -> None:
    command = f'"{sys.executable}" -m paceline.cli list transports {closed}'
    done = subprocess.run(["sh", "-c", command], capture_output=True, check=False, timeout=120)
    assert done.returncode == 0
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize("program", [exec_guarded, cleaner])
def test_programs_that_travel_as_an_argument_are_ascii(program: object) -> None:
    """In a locale of ASCII, Python cannot pass other characters to a process."""
    source = Path(str(program.__file__)).read_text(encoding="utf-8")  # type: ignore[attr-defined]
    assert source.isascii()
    ast.parse(source)
