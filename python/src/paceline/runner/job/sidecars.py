"""Sidecars of a trial: one process on each host that has ranks.

Each trial has sidecars of its own: then a sidecar has one task, needs no protocol for the next
trial, and works the same on every host, under every launcher. `SidecarRequest.ports` keeps
the port stable during a run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from paceline.measure.records.layout import RunFiles, TrialFiles
from paceline.measure.records.metrics.declared import facts_of
from paceline.measure.telemetry import (
    SidecarHandle,
    SidecarRequest,
    sidecar_is_alive,
    start_sidecar,
)
from paceline.plan.trials.rank_context import RankContext
from paceline.plan.trials.trial import Trial
from paceline.runner.job.context import SIDECAR_HOST_VARIABLE, launching_pid
from paceline.runner.job.job import Job


def watch(
    trial: Trial, files: TrialFiles, host_name: str, pids: Sequence[int]
) -> list[SidecarHandle]:
    """Start a sidecar for the process trees of `pids` and the trial's ranks on this host.

    Return its handle, or nothing if the trial wants no sidecar or it cannot be started; that is a
    warning, never an error of the trial.
    """
    if not trial.telemetry.enabled:
        return []
    host = files.host(host_name)
    run = RunFiles(files.root.absolute().parent.parent)  # see RunFiles.trial
    handle = start_sidecar(
        SidecarRequest(
            settings=trial.telemetry,
            run=run.root.name,
            trace=host.trace,
            state=host.sidecar,
            pids=tuple(pids),
            # A user may have given the launcher some cores (taskset); a rank may have fewer.
            cores=tuple(sorted(os.sched_getaffinity(launching_pid()))),
            trial_root=files.root,
            replicas=trial.placement.replicas,
            # the same path for every process, whatever link it came by
            run_targets=run.targets.resolve(),
            facts=facts_of(trial),
        )
    )
    return [] if handle is None else [handle]


@contextmanager
def host_sidecar(job: Job, context: RankContext, watched_pids: Sequence[int]) -> Iterator[None]:
    """Run a sidecar on this host while its first rank trains, unless the host has one already."""
    if (
        context.local_rank != 0
        or os.environ.get(SIDECAR_HOST_VARIABLE) == context.host
        or sidecar_is_alive(job.files.host(context.host).sidecar)
    ):
        yield
        return
    sidecars = watch(job.trial, job.files, context.host, watched_pids or (os.getpid(),))
    try:
        yield
    finally:
        for sidecar in sidecars:
            sidecar.stop()
