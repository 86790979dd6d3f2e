"""The sidecar of a host whose ranks nobody else watches."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

from paceline.telemetry.handle import sidecar_is_alive, start_sidecar
from paceline.telemetry.options import SidecarOptions

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paceline.job.options import Job
    from paceline.train.context import RankContext

# Set by the runner to the name of the host that it watches itself.
SIDECAR_HOST_VARIABLE = "PACELINE_SIDECAR_HOST"


@contextmanager
def host_sidecar(job: Job, context: RankContext, watched_pids: Sequence[int]) -> Iterator[None]:
    """Watch this host while its first rank trains, unless somebody does already.

    A sidecar that does not start is a warning, never an error of the trial.
    """
    settings = job.trial.telemetry
    host = job.files.host(context.host)
    if (
        not settings.enabled
        or context.local_rank != 0
        or os.environ.get(SIDECAR_HOST_VARIABLE) == context.host
        or sidecar_is_alive(host.sidecar)
    ):
        yield
        return
    trial = job.trial
    handle = start_sidecar(
        SidecarOptions(
            listen_host=settings.listen_host,
            listen_port=None if settings.listen_port < 0 else settings.listen_port,
            interval_s=settings.interval_s,
            pids=tuple(watched_pids) or (os.getpid(),),
            out=host.trace,
            state=host.sidecar,
            info={
                "trial": trial.id,
                "workload": trial.training.workload,
                "launcher": trial.launcher,
                "transport": trial.transport,
                "local_strategy": trial.local_strategy,
            },
        )
    )
    try:
        yield
    finally:
        if handle is not None:
            handle.stop()
