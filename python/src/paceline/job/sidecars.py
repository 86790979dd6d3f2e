"""What of a trial is watched on each host, and by whom it is asked for."""

from __future__ import annotations

import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.job.environment import SIDECAR_HOST_VARIABLE
from paceline.records.layout import RunFiles
from paceline.telemetry import SidecarOptions, sidecar_is_alive, start_sidecar
from paceline.telemetry.facts import facts_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paceline.job.trial import Job
    from paceline.plan.trial import Trial
    from paceline.records.layout import TrialFiles
    from paceline.spec.models import TelemetrySettings
    from paceline.telemetry import SidecarHandle
    from paceline.training.context import RankContext


def watch(
    trial: Trial, files: TrialFiles, host_name: str, pids: Sequence[int]
) -> list[SidecarHandle]:
    """Have the process trees of `pids` and the trial's ranks on this host watched.

    Returns the watch, or nothing if the trial wants none or it does not begin: that is a warning,
    never an error of the trial.
    """
    if not trial.telemetry.enabled:
        return []
    host, run = files.host(host_name), _run_of(files)
    options = SidecarOptions(
        **_settings(trial.telemetry, run),
        pids=tuple(pids),
        out=host.trace,
        state=host.sidecar,
        trial_root=files.root,
        info=facts_of(trial),
    )
    handle = start_sidecar(options)
    return [] if handle is None else [handle]


@contextmanager
def kept_sampler(run: RunFiles, settings: TelemetrySettings) -> Iterator[None]:
    """Keep this host's sampler, and so its port, over all trials of a run."""
    handle = None
    if settings.enabled:
        handle = start_sidecar(
            SidecarOptions(
                **_settings(settings, run), pids=(os.getpid(),), out=None, ends_with_caller=True
            )
        )
    try:
        yield
    finally:
        if handle is not None:
            handle.stop()


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


def _run_of(files: TrialFiles) -> RunFiles:
    """The run directory that a trial lies in (RunFiles.trial)."""
    return RunFiles(files.root.absolute().parent.parent)


def _settings(settings: TelemetrySettings, run: RunFiles) -> dict[str, Any]:
    """What is the same for all watches of a run."""

    def path(text: str | None) -> Path | None:
        return None if text is None else Path(text)

    return {
        "listen_host": settings.listen_host,
        "listen_port": None if settings.listen_port < 0 else settings.listen_port,
        "interval_s": settings.interval_s,
        "run": run.root.absolute().name,
        "tls_certificate": path(settings.tls_certificate),
        "tls_key": path(settings.tls_key),
        "tls_client_ca": path(settings.tls_client_ca),
        "basic_auth_file": path(settings.basic_auth_file),
        "bearer_token_file": path(settings.bearer_token_file),
        # one path for all that watch the run, by whatever link they came to it
        "run_targets": run.targets.resolve(),
        "targets_dirs": () if settings.targets_dir is None else (Path(settings.targets_dir),),
        "textfile_dir": path(settings.textfile_dir),
    }
