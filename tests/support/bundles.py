"""The archives of python/tools/bundle.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.once import making_once

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 240.0


def bundle(folder: Path, umask: int) -> None:
    """Make the archives, and check that the command names all of them."""
    done = subprocess.run(
        [sys.executable, ROOT / "python/tools/bundle.py", "--out", folder],
        umask=umask, capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert sorted(map(Path, done.stdout.split())) == sorted(folder.iterdir())


def bundles(shared_folder: Path) -> Path:
    """Return the folder of the archives, made once for all workers. Read only."""
    folder = shared_folder / "bundles"
    with making_once(folder) as is_first:
        if is_first:
            bundle(folder, 0o022)
    return folder
