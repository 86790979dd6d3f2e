"""The launchers by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.launch.local import LocalLauncher
from paceline.launch.mpi import MpiLauncher
from paceline.launch.spark import SparkLauncher
from paceline.launch.torchrun import TorchrunLauncher

if TYPE_CHECKING:
    from paceline.launch.base import Launcher
    from paceline.spec.values import Launcher as LauncherName


def launcher_for(name: LauncherName) -> Launcher:
    """The launcher of that name."""
    launchers: dict[str, Launcher] = {
        launcher.name: launcher
        for launcher in (LocalLauncher(), TorchrunLauncher(), MpiLauncher(), SparkLauncher())
    }
    return launchers[name]
