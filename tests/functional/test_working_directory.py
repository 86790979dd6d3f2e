"""Files of the working directory, and the name of the folder for temporary files, disturb no
launcher; and nothing is left in that folder."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.functional.cli_runs import LIMIT_S, NO_SIDECAR, cli_in, small, trial
from tests.support.commands import run_command

# Of Python, of its packages, and of Paceline: imported by every rank.
_NAMES = ("secrets", "random", "profile", "torch", "numpy", "paceline")


@pytest.mark.parametrize(
    ("launcher", "transport"),
    [("local", "gloo"), ("torchrun", "gloo"), ("mpi", "mpi"), ("spark", "gloo")],
)
def test_no_file_of_the_working_directory_is_imported_and_no_temporary_one_is_left(
    launcher: str, transport: str, cache: Path, tmp_path: Path
) -> None:
    for name in _NAMES:
        mark = tmp_path / f"imported {name}"
        code = f"open({str(mark)!r}, 'a').close()\nraise SystemExit('imported {name}')\n"
        (tmp_path / f"{name}.py").write_text(code)
    spec = tmp_path / "spec.toml"
    spec.write_text(small(max_steps=4).replace(*NO_SIDECAR) + trial(launcher, transport))
    temporary = tmp_path / "with a space"
    temporary.mkdir()
    cli = cli_in(cache, tmp_path)
    words = [
        sys.executable,
        "-P",
        "-m",
        "paceline.cli",
        "run",
        spec,
        "--out",
        tmp_path / "run",
    ]
    environment = {**cli.environment, "TMPDIR": str(temporary)}
    ended = run_command(words, LIMIT_S, env=environment, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert list(tmp_path.glob("imported *")) == []
    assert [each for each in temporary.iterdir() if "torchinductor" not in each.name] == []
