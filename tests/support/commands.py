"""Run commands, and start them."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def run_command(
    words: Iterable[object],
    limit_s: float,
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Return how a command without input ended, whatever its exit status, and what it wrote."""
    return subprocess.run(
        [str(word) for word in words], env=env, cwd=cwd, timeout=limit_s,
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip


def start_command(
    words: Iterable[object], log: Path, *, env: Mapping[str, str] | None = None, **options: Any
) -> subprocess.Popen[bytes]:
    """Start a command without input; its output becomes the content of `log`."""
    with log.open("wb") as output:
        return subprocess.Popen(
            [str(word) for word in words], env=env,
            stdin=subprocess.DEVNULL, stdout=output, stderr=output, **options,
        )  # fmt: skip
