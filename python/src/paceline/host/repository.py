"""The state of the git repository that a run was started in."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

_LIMIT_S = 10.0


def repository_state(folder: Path) -> dict[str, Any] | None:
    """Return the commit of the repository that contains `folder`, and whether files were changed.

    None without git, a repository or a commit, and if git takes too long.
    """
    commit = _git(folder, "rev-parse", "HEAD")
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    if commit is None or changes is None:
        return None
    return {"commit": commit, "has_local_changes": bool(changes)}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return done.stdout.strip()
