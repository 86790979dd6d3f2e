"""The command side of a launcher, found by its name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.spec.extensions import LAUNCHERS, load_object

if TYPE_CHECKING:
    from paceline.host.tools import Finding
    from paceline.launchers.base import Launcher


def launcher_for(name: str) -> Launcher:
    """Return the launcher of that name. Raises UsageError for an unknown name."""
    launcher: Launcher = load_object(LAUNCHERS.get(name).implementation)()
    return launcher


def launcher_findings() -> list[Finding]:
    """Return what `paceline doctor` shows about the launchers."""
    paths = [launcher.checks for launcher in LAUNCHERS.all() if launcher.checks is not None]
    return [finding for path in paths for finding in load_object(path)()]
