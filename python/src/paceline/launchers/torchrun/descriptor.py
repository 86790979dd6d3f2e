"""Descriptor of `torchrun`: PyTorch's own launcher, on this node only."""

from __future__ import annotations

from paceline.spec.descriptors import LauncherDescriptor


class Torchrun(LauncherDescriptor):
    """`python -m torch.distributed.run`."""

    name = "torchrun"
    summary = "PyTorch's own launcher, on this node"
    position = 20
    restarts_ranks = True
    programs = frozenset({"torchrun", "torch.distributed.run"})
    implementation = "paceline.launchers.torchrun.launcher:TorchrunLauncher"
    checks = "paceline.launchers.torchrun.launcher:checks"
    render_slurm = "paceline.launchers.torchrun.launcher:slurm_step"
    render_kubernetes = "paceline.launchers.torchrun.launcher:kubernetes_object"
