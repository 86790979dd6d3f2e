"""Write requirements.lock from pyproject.toml: `.venv/bin/python python/tools/lock.py`.

The pins of the present lock are kept, except those named with --upgrade, or all of them with
--upgrade-all. Everything is resolved and installed in a temporary environment. So a lock that
cannot be installed, or whose packages conflict, is never written.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

PROJECT_DIR = Path(__file__).resolve().parents[1]
LOCK_FILE = PROJECT_DIR / "requirements.lock"
# Built from source with --no-build-isolation by pacelinew: pyspark, and Paceline itself.
BUILD_REQUIREMENTS = ("setuptools", "wheel")
NOT_LOCKED = ("paceline", "pip")
LOCKED_EXTRAS = ("mpi", "petastorm", "spark", "nifti", "dev", "docs")
INSTALL_LIMIT_S = 3600.0

HEADER = """\
# Every package of Paceline's environment, tests and checks included. Python 3.11, Linux.
# Written by python/tools/lock.py: change pyproject.toml and run that instead of editing here.
#
# No hashes: `torch==X` may install the CPU-only build (`X+cpu`) or the build of the index (with
# CUDA libraries, several GB more). A hash would allow only one of them. How to get the CPU-only
# build: python/README.md.
"""


def pinned_names(lock_text: str) -> dict[str, str]:
    """Return the requirement lines of a lock file by normalised name (PEP 503)."""
    lines = (line.strip() for line in lock_text.splitlines())
    return {_normal(line.split("==")[0]): line for line in lines if line and line[0] != "#"}


def lock_text(frozen: str) -> str:
    """Turn the output of `pip freeze --all` into the text of a lock file."""
    pins = pinned_names("\n".join(line for line in frozen.splitlines() if "==" in line))
    kept = (pin for name, pin in sorted(pins.items()) if name not in NOT_LOCKED)
    # A local version (+cpu) names one builder's file; without it any build of that version matches.
    return HEADER + "".join(f"{pin.split('+')[0]}\n" for pin in kept)


def constraints(present: str, upgrade: list[str]) -> str:
    """Return the pins of the present lock that must be kept."""
    free = {_normal(name) for name in upgrade}
    unknown = sorted(free - pinned_names(present).keys())
    if unknown:
        raise SystemExit(f"--upgrade: expected packages of {LOCK_FILE}, got {', '.join(unknown)}")
    return "\n".join(pin for name, pin in pinned_names(present).items() if name not in free)


def wanted() -> list[str]:
    """Return the requirements of pyproject.toml: those of `paceline[all]` and development tools."""
    project = tomllib.loads((PROJECT_DIR / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    locked = [extras[name] for name in LOCKED_EXTRAS]
    return [*project["dependencies"], *(line for group in locked for line in group)]


def resolve(kept_pins: str, base_python: str) -> str:
    """Install pyproject.toml's ranges in a temporary environment; return `pip freeze`."""
    with tempfile.TemporaryDirectory(prefix="paceline-lock-") as folder:
        env_dir = Path(folder) / "venv"
        constraints_file = Path(folder) / "constraints.txt"
        constraints_file.write_text(kept_pins, encoding="utf-8")
        _run([base_python, "-I", "-m", "venv", str(env_dir)])
        python = str(env_dir / "bin" / "python")
        pip = [python, "-I", "-m", "pip", "--no-input", "--disable-pip-version-check"]
        install = [*pip, "install", "--constraint", str(constraints_file)]
        _run([*install, *BUILD_REQUIREMENTS])
        _run([*install, "--no-build-isolation", *wanted()])
        _run([*pip, "check"])
        return _run([*pip, "freeze", "--all"], capture=True)


def _run(argv: list[str], *, capture: bool = False) -> str:
    done = subprocess.run(
        argv,
        stdout=subprocess.PIPE if capture else sys.stderr,
        text=True,
        timeout=INSTALL_LIMIT_S,
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(argv)}: ended with {done.returncode}; the lock is unchanged")
    return done.stdout if capture else ""


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def main() -> None:
    """Write the lock file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--upgrade", action="append", default=[], metavar="PACKAGE")
    parser.add_argument("--upgrade-all", action="store_true")
    arguments = parser.parse_args()
    present = LOCK_FILE.read_text(encoding="utf-8") if LOCK_FILE.exists() else ""
    kept = "" if arguments.upgrade_all else constraints(present, arguments.upgrade)
    base_python = os.path.realpath(sys.executable)
    text = lock_text(resolve(kept, base_python))
    LOCK_FILE.write_text(text, encoding="utf-8")
    print(f"{LOCK_FILE}: {len(pinned_names(text))} packages", file=sys.stderr)


if __name__ == "__main__":
    main()
