"""Install the wheel beside several versions of torch and NumPy, and run a script there.

    .venv/bin/python python/tools/torch_versions.py FOLDER [--versions 2.9.1/1.26.4 2.14.1/2.3.5]
        [--tests] [--out docs/results/raw/torch_versions.json]

Each version gets an environment of its own in FOLDER, in which torch and NumPy are installed first,
as a user has them, and then the wheel. Time and size of both are measured, and `paceline run` of a
script. With `--tests`, the tests of scripts run there, too (`SCRIPT_TESTS`), with the extras that
they need. Packages come from the sources that pip is set up for. An environment that is there is
used again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import venv
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import bundle

ROOT = Path(__file__).resolve().parents[2]
VERSIONS = ("2.9.1/1.26.4", "2.13.0/1.26.4", "2.14.1/2.3.5")
INSTALL_LIMIT_S = 1800.0
RUN_LIMIT_S = 300.0
TESTS_LIMIT_S = 3600.0
SCRIPT_TESTS = (
    "tests/unit/attach",
    "tests/unit/train/rank/script",
    "tests/unit/test_example_layouts.py",
    "tests/unit/torch_internals",
    "tests/unit/collectives/test_recorder.py",
    "tests/unit/collectives/test_torch_internals.py",
    "tests/functional/test_attach.py",
    "tests/functional/test_hangs.py",
    "tests/functional/test_script.py",
    "tests/functional/test_verify.py",
)
# What these tests import, and the launchers that they start.
TEST_EXTRAS = "mpi,spark"
TEST_PACKAGES = ("hypothesis", "pillow", "pytest", "pytest-timeout", "pytest-xdist")
# The same, built for the major version of NumPy.
OF_NUMPY = {
    "1": ("pyarrow==14.0.2", "opencv-python-headless<4.12"),
    "2": ("pyarrow", "opencv-python-headless"),
}


def main() -> None:
    options = arguments()
    folder = options.folder.resolve()
    wheel, _ = bundle.build_distributions(folder / "dist")
    found = [of_version(each, folder, wheel, tests=options.tests) for each in options.versions]
    text = json.dumps({"date": time.strftime("%Y-%m-%d"), "versions": found}, indent=1)
    if options.out is not None:
        options.out.write_text(text + "\n", "utf-8")
    print(text)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="several GB for each version")
    parser.add_argument("--versions", nargs="+", default=VERSIONS, metavar="TORCH/NUMPY")
    parser.add_argument("--tests", action="store_true", help="run the tests of scripts, too")
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    return parser.parse_args()


def of_version(version: str, folder: Path, wheel: Path, *, tests: bool) -> dict[str, Any]:
    """Return what the installation and a run beside one version took, and the tests' outcome."""
    torch, _, numpy = version.partition("/")
    place = folder / f"torch-{torch}-numpy-{numpy}"
    if (place / "bin/python").exists():  # pip takes a wheel of the same version for installed
        timed([place / "bin/python", "-m", "pip", "uninstall", "-q", "-y", "paceline"], RUN_LIMIT_S)
    else:
        venv.create(place, with_pip=True)
    theirs_s = pip(place, f"torch=={torch}", f"numpy=={numpy}")
    theirs_bytes = size_bytes(place)
    ours_s = pip(place, str(wheel))
    ours_bytes = size_bytes(place) - theirs_bytes
    run_s = timed(
        [place / "bin/paceline", "run", "--max-steps", "20", "--repeats", "1",
         "--out", place / f"run-{time.time_ns()}", ROOT / "examples/scripts/ddp.py",
         "--width", "32"],
        RUN_LIMIT_S,
    )  # fmt: skip
    found = {
        "torch": torch,
        "numpy": numpy,
        "python": sys.version.split()[0],
        "theirs_s": theirs_s,
        "theirs_bytes": theirs_bytes,
        "paceline_s": ours_s,
        "paceline_bytes": ours_bytes,
        "run_s": run_s,
    }
    return {**found, "tests": tested(place, wheel, numpy)} if tests else found


def tested(place: Path, wheel: Path, numpy: str) -> dict[str, Any]:
    """Run the tests of scripts; return their numbers, and the names of those that failed."""
    packages = (*TEST_PACKAGES, *OF_NUMPY[numpy[0]])
    pip(place, f"{wheel}[{TEST_EXTRAS}]", f"numpy=={numpy}", *packages)
    results = place / "tests.xml"
    add_job_scripts(place)
    timed(
        [place / "bin/python", "-m", "pytest", "-q", "-n", "0", "-c", "python/pyproject.toml",
         "--rootdir", ".", "-p", "no:cacheprovider", f"--junitxml={results}", *SCRIPT_TESTS],
        TESTS_LIMIT_S,
        {"PATH": f"{place / 'bin'}{os.pathsep}{os.environ['PATH']}"},  # its programs are started
        check=False,
    )  # fmt: skip
    [suite] = ET.parse(results).getroot().iter("testsuite")  # noqa: S314  (pytest's)
    names = ("tests", "failures", "errors", "skipped")
    return {
        "files": list(SCRIPT_TESTS),
        **{name: int(suite.attrib[name]) for name in names},
        "failed": [
            f"{case.attrib['classname']}::{case.attrib['name']}"
            for case in suite.iter("testcase")
            if case.find("failure") is not None or case.find("error") is not None
        ],
    }


def add_job_scripts(place: Path) -> None:
    """Put the job scripts, which the wheel lacks, where an environment looks for them.

    Tests hand no variable of Paceline on to what they start, so PACELINE_JOBS would not reach it.
    """
    share = place / "share/paceline"
    share.mkdir(parents=True, exist_ok=True)
    for name in ("mpi-jobs", "spark-jobs"):
        if not (share / name).exists():
            (share / name).symlink_to(ROOT / name)


def pip(place: Path, *requirements: str) -> float:
    """Install into an environment; return the seconds that it took."""
    return timed(
        [place / "bin/python", "-m", "pip", "--disable-pip-version-check", "install", "-q",
         *requirements],
        INSTALL_LIMIT_S,
    )  # fmt: skip


def timed(
    command: list[Any],
    limit_s: float,
    variables: Mapping[str, str] | None = None,
    *,
    check: bool = True,
) -> float:
    started_s = time.monotonic()
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment = {**kept, **(variables or {})}
    subprocess.run(command, env=environment, cwd=ROOT, timeout=limit_s, check=check)
    return round(time.monotonic() - started_s, 1)


def size_bytes(place: Path) -> int:
    """Return the bytes of all files of an environment, each hard link once."""
    found = {}
    for path in place.rglob("*"):
        if not path.is_symlink() and path.is_file():
            entry = path.stat()
            found[entry.st_dev, entry.st_ino] = entry.st_blocks * 512
    return sum(found.values())


if __name__ == "__main__":
    main()
