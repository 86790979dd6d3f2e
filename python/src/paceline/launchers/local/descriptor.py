"""Descriptor of `local`: processes on this node, started by Paceline itself."""

from __future__ import annotations

from paceline.spec.descriptors import LauncherDescriptor


class Local(LauncherDescriptor):
    """Plain processes on one node, as a user would start them by hand."""

    name = "local"
    summary = "processes on this node"
    position = 10
    implementation = "paceline.launchers.local.launcher:LocalLauncher"
    render_slurm = "paceline.launchers.local.launcher:slurm_step"
    render_kubernetes = "paceline.launchers.local.launcher:kubernetes_object"
