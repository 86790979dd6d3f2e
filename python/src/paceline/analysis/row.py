"""One configuration's line in a comparison; `to_json` is a row of `paceline compare --json`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.analysis.statistics import interval_json
from paceline.records.files import jsonable
from paceline.records.phases import PHASES, STEP_PHASES

if TYPE_CHECKING:
    from paceline.analysis.pipeline import Pipeline
    from paceline.analysis.statistics import Interval
    from paceline.analysis.usage import MemoryKind
    from paceline.records.phases import Phases


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One configuration: medians over its finished repeats. None is what was not measured."""

    configuration: str
    workload: str
    launcher: str
    transport: str
    local_strategy: str
    nodes: int
    ranks: int
    ranks_per_node: int
    threads_per_rank: int
    replicas: int  # of the model, each with its own part of the batch
    replicas_per_node: int
    stages: int  # 1 without a pipeline, as replicas is 1 without data parallelism
    micro_batches: int | None
    schedule: str | None
    balance: str | None
    split_points: tuple[int, ...] | None  # as asked for; `pipeline` says where they came to lie
    reduction: str | None
    device: str
    cores: int  # given, of all nodes
    precision: str
    memory_format: str
    bucket_mb: float
    buckets_in_flight: int | None
    algorithm: str | None  # of transport mpi
    mpi_parameters: tuple[tuple[str, str], ...]  # name and value, by name
    compression: str | None  # with its setting: "powersgd 4"
    averaging: str | None  # local SGD: "every 6 steps"
    global_batch: int
    repeats: int
    is_baseline: bool
    samples_per_s: Interval | None
    step_s: Interval | None
    speedup: Interval | None
    efficiency: Interval | None
    images: int | None  # trained on after the warm-up, all repeats
    samples_per_s_overall: float | None  # those over the time they took: a mean, stalls included
    time_to_first_step_s: float | None
    wall_s: float | None
    phases_s: Phases
    step_phases_s: Phases
    other_parts_s: Phases  # the known parts of `other`
    cpu_percent: float | None
    iowait_percent: float | None
    ram_percent_mean: float | None
    ram_percent_peak: float | None
    memory_peak_bytes: float | None
    memory_peak_kind: MemoryKind | None
    threads_median: float | None
    threads_peak: float | None
    pipeline: Pipeline | None
    final_loss: float | None
    equivalent: bool | None
    does_not_apply: str | None  # why it may end otherwise than the baseline
    max_abs_weight_diff: float | None
    weights_sha256: str | None
    notes: tuple[str, ...]

    @property
    def threads_per_worker(self) -> int:
        """Threads within an operation: of a rank, or of each replica that is a thread."""
        workers = self.replicas_per_node * self.stages
        return self.ranks_per_node * self.threads_per_rank // workers

    @property
    def ranked(self) -> bool:
        """Whether its speed may be set against others': only the same training may."""
        return self.equivalent is True and self.samples_per_s is not None

    def to_json(self) -> dict[str, Any]:
        return {
            "configuration": self.configuration,
            "workload": self.workload,
            "launcher": self.launcher,
            "transport": self.transport,
            "local_strategy": self.local_strategy,
            "nodes": self.nodes,
            "ranks": self.ranks,
            "threads_per_rank": self.threads_per_rank,
            "replicas": self.replicas,
            "replicas_per_node": self.replicas_per_node,
            "stages": self.stages,
            "micro_batches": self.micro_batches,
            "schedule": self.schedule,
            "balance": self.balance,
            "split_points": None if self.split_points is None else list(self.split_points),
            "reduction": self.reduction,
            "device": self.device,
            "cores": self.cores,
            "precision": self.precision,
            "memory_format": self.memory_format,
            "bucket_mb": self.bucket_mb,
            "buckets_in_flight": self.buckets_in_flight,
            "algorithm": self.algorithm,
            "mpi_parameters": dict(self.mpi_parameters),
            "compression": self.compression,
            "averaging": self.averaging,
            "global_batch": self.global_batch,
            "repeats": self.repeats,
            "is_baseline": self.is_baseline,
            "samples_per_s": interval_json(self.samples_per_s),
            "step_s": interval_json(self.step_s),
            "speedup": interval_json(self.speedup),
            "efficiency": interval_json(self.efficiency),
            "images": self.images,
            "samples_per_s_overall": self.samples_per_s_overall,
            "time_to_first_step_s": self.time_to_first_step_s,
            "wall_s": self.wall_s,
            "phases_s": {name: self.phases_s.get(name) for name in PHASES},
            "step_phases_s": {name: self.step_phases_s.get(name) for name in STEP_PHASES},
            "other_parts_s": dict(self.other_parts_s),
            "cpu_percent": self.cpu_percent,
            "iowait_percent": self.iowait_percent,
            "ram_percent_mean": self.ram_percent_mean,
            "ram_percent_peak": self.ram_percent_peak,
            "memory_peak_bytes": self.memory_peak_bytes,
            "memory_peak_kind": self.memory_peak_kind,
            "threads_median": self.threads_median,
            "threads_peak": self.threads_peak,
            "pipeline": None if self.pipeline is None else jsonable(self.pipeline),
            "final_loss": self.final_loss,
            "equivalent": self.equivalent,
            "equivalence_does_not_apply": self.does_not_apply,
            "max_abs_weight_diff": self.max_abs_weight_diff,
            "weights_sha256": self.weights_sha256,
            "notes": list(self.notes),
        }
