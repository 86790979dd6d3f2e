"""The launchers by name, until descriptors provide them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.spec.extensions import load_object

if TYPE_CHECKING:
    from paceline.host.tools import Finding
    from paceline.launchers.base import Launcher

_IMPLEMENTATIONS = {
    "local": "paceline.launchers.local.launcher:LocalLauncher",
    "torchrun": "paceline.launchers.torchrun.launcher:TorchrunLauncher",
    "mpi": "paceline.launchers.mpi.launcher:MpiLauncher",
    "spark": "paceline.launchers.spark.launcher:SparkLauncher",
}
_CHECKS = (
    "paceline.launchers.mpi.tools:checks",
    "paceline.launchers.spark.tools:checks",
    "paceline.launchers.torchrun.launcher:checks",
)


def launcher_for(name: str) -> Launcher:
    """Return the launcher of that name."""
    launcher: Launcher = load_object(_IMPLEMENTATIONS[name])()
    return launcher


def launcher_findings() -> list[Finding]:
    """Return what `paceline doctor` shows about the launchers."""
    return [finding for path in _CHECKS for finding in load_object(path)()]
