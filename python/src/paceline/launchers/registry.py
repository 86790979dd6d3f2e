"""The launchers by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.launchers.local.launcher import LocalLauncher
from paceline.launchers.mpi.launcher import MpiLauncher
from paceline.launchers.spark.launcher import SparkLauncher
from paceline.launchers.torchrun.launcher import TorchrunLauncher

if TYPE_CHECKING:
    from paceline.launchers.base import Launcher
    from paceline.spec.values import Launcher as LauncherName


def launcher_for(name: LauncherName) -> Launcher:
    """The launcher of that name."""
    launchers: dict[str, Launcher] = {
        launcher.name: launcher
        for launcher in (LocalLauncher(), TorchrunLauncher(), MpiLauncher(), SparkLauncher())
    }
    return launchers[name]
