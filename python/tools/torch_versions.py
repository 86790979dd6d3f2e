"""Install the wheel beside several versions of torch and NumPy, and run a script there.

    .venv/bin/python python/tools/torch_versions.py FOLDER [--versions 2.9.1/1.26.4 2.14.1/2.3.5]
        [--out docs/results/raw/torch_versions.json]

Each version gets an environment of its own in FOLDER, in which torch and NumPy are installed first,
as a user has them, and then the wheel. Time and size of both are measured, and `paceline run` of a
script. Packages come from the sources that pip is set up for. An environment that is there is used
again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import venv
from pathlib import Path
from typing import Any

import bundle

ROOT = Path(__file__).resolve().parents[2]
VERSIONS = ("2.9.1/1.26.4", "2.13.0/1.26.4", "2.14.1/2.3.5")
INSTALL_LIMIT_S = 1800.0
RUN_LIMIT_S = 300.0


def main() -> None:
    options = arguments()
    folder = options.folder.resolve()
    wheel, _ = bundle.build_distributions(folder / "dist")
    found = [of_version(version, folder, wheel) for version in options.versions]
    text = json.dumps({"date": time.strftime("%Y-%m-%d"), "versions": found}, indent=1)
    if options.out is not None:
        options.out.write_text(text + "\n", "utf-8")
    print(text)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="several GB for each version")
    parser.add_argument("--versions", nargs="+", default=VERSIONS, metavar="TORCH/NUMPY")
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    return parser.parse_args()


def of_version(version: str, folder: Path, wheel: Path) -> dict[str, Any]:
    """Return what the installation and a run beside one version took."""
    torch, _, numpy = version.partition("/")
    place = folder / f"torch-{torch}-numpy-{numpy}"
    if not (place / "bin/python").exists():
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
    return {
        "torch": torch,
        "numpy": numpy,
        "python": sys.version.split()[0],
        "theirs_s": theirs_s,
        "theirs_bytes": theirs_bytes,
        "paceline_s": ours_s,
        "paceline_bytes": ours_bytes,
        "run_s": run_s,
    }


def pip(place: Path, *requirements: str) -> float:
    """Install into an environment; return the seconds that it took."""
    return timed(
        [place / "bin/python", "-m", "pip", "--disable-pip-version-check", "install", "-q",
         *requirements],
        INSTALL_LIMIT_S,
    )  # fmt: skip


def timed(command: list[Any], limit_s: float) -> float:
    started_s = time.monotonic()
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    subprocess.run(command, env=environment, timeout=limit_s, check=True)
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
