"""A planned trial as the options that job scripts take by hand.

So what a scheduler starts keeps its own records in the run directory, as any trial started by hand.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from paceline.job.trial_by_hand import TELEMETRY_PATHS
from paceline.plan.trial import DEFAULT_BUCKET_MB, LOOPBACK
from paceline.spec.models import Limits, TelemetrySettings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.plan.trial import Trial


def why_not(trial: Trial) -> str | None:
    """Why no options mean this trial; None if there are some."""
    if trial.mpi_parameters:
        return "its mpi_parameters are part of its name, and job scripts have no option for them"
    return None


def job_arguments(trial: Trial, *, data: str, run_dir: str) -> list[str]:
    """Everything about `trial` but its launcher and the number of its repeat.

    data, run_dir: where both are for the ranks.
    """
    words: list[str] = []
    for name, value in _options(trial, data, run_dir):
        if value is True:
            words.append(f"--{name}")
        elif value is not None and value is not False:
            words += [f"--{name}", f"{value:.15g}" if isinstance(value, float) else str(value)]
    return words


def telemetry_paths(trial: Trial) -> dict[str, Path]:
    """What the sidecar is to read and write, by key of [telemetry].

    Relative paths begin here, as for `paceline run`: a job may begin in any directory.
    """
    named = ((name, getattr(trial.telemetry, name)) for name in TELEMETRY_PATHS)
    return {name: Path(path).absolute() for name, path in named if path is not None}


_Option = tuple[str, str | float | bool | None]


def _options(trial: Trial, data: str, run_dir: str) -> Iterator[_Option]:
    training, limits = trial.training, trial.limits
    yield "workload", training.workload
    yield "data", data
    yield "out", run_dir
    yield "name", trial.experiment
    yield "seed", training.seed
    yield from _placement(trial)
    yield from _communication(trial)
    yield "global-batch", training.global_batch
    yield "epochs", training.epochs
    yield "max-steps", training.max_steps
    yield "warmup-steps", training.warmup_steps
    yield "image-size", training.image_size
    yield "precision", training.precision
    yield "memory-format", training.memory_format
    yield "learning-rate", training.learning_rate
    yield "momentum", training.momentum
    yield "no-dropout", not training.dropout
    yield "reading", training.reading
    usual = Limits()
    yield "trial-timeout", _unless(limits.trial_s, usual.trial_s)
    yield "rendezvous-timeout", _unless(limits.rendezvous_s, usual.rendezvous_s)
    yield "collective-timeout", _unless(limits.collective_s, usual.collective_s)
    yield from _telemetry(trial)


def _placement(trial: Trial) -> Iterator[_Option]:
    place, pipeline = trial.placement, trial.pipeline
    yield "local-strategy", trial.local_strategy
    yield "ranks", place.ranks
    yield "ranks-per-node", place.ranks_per_node
    yield "threads-per-rank", place.threads_per_rank
    if trial.local_strategy in ("threads", "hybrid"):
        yield "replicas", trial.replicas_per_node
    if pipeline is not None:
        yield "stages", pipeline.stages
        yield "micro-batches", pipeline.micro_batches
        yield "schedule", pipeline.schedule
        yield "balance", None if pipeline.split_points else pipeline.balance
        yield (
            "split-points",
            ",".join(map(str, pipeline.split_points)) if pipeline.split_points else None,
        )
    yield "oversubscribe", place.oversubscribe
    yield "device", _unless(trial.device, "cpu")


def _communication(trial: Trial) -> Iterator[_Option]:
    yield "transport", trial.transport
    yield "reduction", trial.reduction
    yield "interface", _unless(trial.interface, LOOPBACK)
    yield "bucket-mb", _unless(trial.bucket_mb, DEFAULT_BUCKET_MB)
    yield "buckets-in-flight", trial.buckets_in_flight
    yield "algorithm", trial.algorithm
    if trial.compression is not None:
        yield "compression", trial.compression.method
        yield "compression-rank", trial.compression.rank
        yield "compression-density", trial.compression.density
    if trial.averaging is not None:
        yield "averaging-period", trial.averaging.period
        yield "averaging-start", _unless(trial.averaging.start_step, 0)


def _telemetry(trial: Trial) -> Iterator[_Option]:
    telemetry, usual = trial.telemetry, TelemetrySettings()
    if not telemetry.enabled:
        yield "no-sidecar", True
        return
    yield "telemetry-interval", _unless(telemetry.interval_s, usual.interval_s)
    yield "telemetry-listen-host", _unless(telemetry.listen_host, usual.listen_host)
    yield "telemetry-listen-port", _unless(telemetry.listen_port, usual.listen_port)
    for name, path in telemetry_paths(trial).items():
        yield f"telemetry-{name.replace('_', '-')}", str(path)


def _unless(value: str | float, usual: str | float) -> str | float | None:
    return None if value == usual else value
