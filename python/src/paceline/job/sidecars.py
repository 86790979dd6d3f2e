"""The sidecar of a host whose ranks nobody else watches."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

from paceline.launch.environment import SIDECAR_HOST_VARIABLE
from paceline.telemetry import SidecarOptions, sidecar_is_alive, start_sidecar

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paceline.job.options import Job
    from paceline.plan.trial import Trial
    from paceline.records.layout import TrialFiles
    from paceline.telemetry import SidecarHandle
    from paceline.train.context import RankContext


def watch(
    trial: Trial, files: TrialFiles, host_name: str, pids: Sequence[int]
) -> list[SidecarHandle]:
    """Start a sidecar that watches the process trees of `pids` on this host.

    Returns it, or nothing if the trial wants none or it does not start: that is a warning, never
    an error of the trial.
    """
    settings = trial.telemetry
    if not settings.enabled:
        return []
    host = files.host(host_name)
    handle = start_sidecar(
        SidecarOptions(
            listen_host=settings.listen_host,
            listen_port=None if settings.listen_port < 0 else settings.listen_port,
            interval_s=settings.interval_s,
            pids=tuple(pids),
            out=host.trace,
            state=host.sidecar,
            info={
                "trial": trial.id,
                "workload": trial.training.workload,
                "launcher": trial.launcher,
                "transport": trial.transport,
                "local_strategy": trial.local_strategy,
            },
        ),
        log=host.log,
    )
    return [] if handle is None else [handle]


@contextmanager
def host_sidecar(job: Job, context: RankContext, watched_pids: Sequence[int]) -> Iterator[None]:
    """Watch this host while its first rank trains, unless somebody does already."""
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
