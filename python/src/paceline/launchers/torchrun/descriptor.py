"""Descriptor of `torchrun`: torch's own launcher, restricted to this node."""

from __future__ import annotations

from paceline.spec.descriptors import LauncherDescriptor


class Torchrun(LauncherDescriptor):
    """`python -m torch.distributed.run`."""

    name = "torchrun"
    summary = "torch's own launcher, on this node"
    position = 20
    checks = "paceline.launchers.torchrun.launcher:checks"
    implementation = "paceline.launchers.torchrun.launcher:TorchrunLauncher"
    render_slurm = "paceline.launchers.torchrun.render:slurm_step"
    render_kubernetes = "paceline.launchers.torchrun.render:kubernetes_object"
