"""A pipe or a device in the place of a file is refused before it is read."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from paceline.base.errors import ExitCode, UsageError
from paceline.base.host.files import odd_files, regular_bytes
from paceline.cli.app import main
from paceline.plan.spec.loading import load_spec

pytestmark = pytest.mark.timeout(30)


@pytest.fixture(params=["pipe", "device", "link to a device", "folder"])
def odd(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "odd.py"
    if request.param == "pipe":
        os.mkfifo(path)
    elif request.param == "folder":
        path.mkdir()
    else:
        zero = Path("/dev/zero")
        if request.param == "device":
            return zero
        path.symlink_to(zero)
    return path


def test_what_is_no_file_is_not_read(odd: Path) -> None:
    with pytest.raises(OSError, match="expected a file, got a folder, a pipe or a device"):
        regular_bytes(odd)


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(OSError, match="that has none"):
        regular_bytes(path)
    path.write_bytes(bytes(2**26 + 1))
    with pytest.raises(OSError, match="expected at most 64 MiB"):
        regular_bytes(path)
    path.write_bytes(b"x")
    assert regular_bytes(path) == b"x"


@pytest.mark.parametrize("key", ["script", "task"])
def test_a_spec_with_a_device_is_refused(key: str, tmp_path: Path) -> None:
    value = "/dev/zero" if key == "script" else "/dev/zero:Net"
    spec = tmp_path / "spec.toml"
    spec.write_text(
        f'schema = 2\nname = "x"\n[[workloads]]\nname = "own"\n{key} = "{value}"\n'
        'max_steps = 4\n[[trials]]\nlauncher = "local"\nlocal_strategy = "sequential"\n'
    )
    assert main(["plan", str(spec)]) == ExitCode.USAGE


def test_a_spec_without_an_end_is_refused() -> None:
    with pytest.raises(UsageError, match="expected a TOML file, got more than 16 MiB"):
        load_spec("/dev/zero")


@pytest.mark.parametrize("kind", ["pipe", "socket", "link"])
@pytest.mark.parametrize("command", ["compare", "explain", "report", "export", "profile", "watch"])
def test_a_run_directory_with_a_pipe_is_refused(kind: str, command: str, tmp_path: Path) -> None:
    place = tmp_path / "run" / "trials" / "a"
    (place / "made").mkdir(parents=True)
    os.mkfifo(place / "made" / "pipe")  # of the user's script
    assert odd_files(tmp_path / "run", "made") == (None, None)
    odd = place / "outcome.json"
    if kind == "pipe":
        os.mkfifo(odd)
    elif kind == "link":
        odd.symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as listener:
        if kind == "socket":
            listener.bind(str(odd))
        words = {"export": ["--to", "csv"], "watch": ["--once"]}.get(command, [])
        assert main([command, str(tmp_path / "run"), *words]) == ExitCode.USAGE
