"""The rows that runs leave behind. Field names carry units; times named `_unix_s` are seconds since
the epoch on the clock of the host that wrote them, other `_s` fields are durations.

A missing measurement is None, never 0. Fields are only ever added; SCHEMA rises when one changes
its meaning.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

SCHEMA = 2

SpanName = Literal[
    "imports",  # interpreter start to all modules imported
    "rendezvous",  # process group, clock offsets
    "data_load",  # opening the data set, decoding in `memory` mode
    "model_build",  # initial weights, wrapping
    "train",  # first step's start to last step's end
    "bookkeeping",  # tensors and results written
]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanRow:
    """One stretch of a rank's life (`ranks/<rank>/spans.jsonl`)."""

    name: SpanName
    started_unix_s: float
    ended_unix_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """One training step of one rank (`ranks/<rank>/steps.jsonl`).

    data_wait_s + forward_s + backward_s + bubble_s + comm_s + optimizer_s + other_s = step_s.
    In a pipeline, the samples are counted by the first stage and the loss by the last.
    `comm_s` is exposed communication: from the rank's last gradient being ready to all gradients
    averaged. `comm_ready_unix_s` is when this rank's last gradient was ready; the analysis splits
    comm_s with it into waiting for the slowest rank and transfer. Both are None without peers.
    """

    step: int  # global step, from 0
    epoch: int  # from 0
    started_unix_s: float
    samples: int  # this rank's share of the global batch, padding not counted
    global_samples: int  # the whole global batch
    loss_sum: float  # sum of the per-sample losses of this rank's share
    data_wait_s: float
    forward_s: float
    backward_s: float
    comm_s: float | None
    comm_ready_unix_s: float | None
    optimizer_s: float
    other_s: float
    step_s: float
    bubble_s: float | None = None  # a stage's waiting for its neighbours; None without a pipeline


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicationRow:
    """One operation of one process group on one rank (`ranks/<rank>/communication.jsonl`).

    Times are on the clock of the rank's host; RankEnvironment has its offset from rank 0's. The
    same (group, sequence) on all ranks of a group is the same operation.
    """

    group: str  # its name; the same on all of its ranks
    ranks: int  # of the group
    sequence: int  # within the group, from 0
    operation: str  # as torch names it: "allreduce"
    algorithm: str | None  # how it was carried out, where the transport has a choice
    payload_bytes: int  # of this rank's tensors
    arrived_unix_s: float  # when this rank asked for it
    started_unix_s: float | None  # when its turn came, where a group's operations queue
    ended_unix_s: float
    sent_bytes: int | None  # by this rank to others; None where the transport does not count
    sent_messages: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleLogRow:
    """Which samples a rank saw in a step (`ranks/<rank>/samples.jsonl`)."""

    step: int
    epoch: int
    sample_ids: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEnvironment:
    """What a thread that trains a replica of its own really had."""

    worker: int  # within its rank
    thread_id: int  # the kernel's
    intraop_threads: int
    affinity: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnvironment:
    """What a rank really had (`ranks/<rank>/environment.json`), read back, not as asked."""

    rank: int
    world_size: int
    local_rank: int
    node_index: int
    host: str
    pid: int
    intraop_threads: int
    interop_threads: int
    omp_environment: dict[str, str]  # OMP_*, MKL_*, KMP_*, GOMP_*, OPENBLAS_* as set
    affinity: list[int]
    cgroup_cpu_limit: float | None  # cores
    cgroup_memory_limit_bytes: int | None
    cpu_model: str
    precision: str
    memory_format: str
    transport: str
    interface: str
    clock_offset_s: float  # add to this rank's unix times to get rank 0's
    clock_error_s: float
    versions: dict[str, str]
    initial_weights_sha256: str
    device: str = "cpu"  # as torch names it, with its model: "cuda:0 (NVIDIA H200)"
    numa_nodes: list[int] = field(default_factory=list)  # that `affinity` lies on; [] if unknown
    workers: list[WorkerEnvironment] = field(default_factory=list)  # threads with replicas
    keeps_freed_memory: bool | None = None  # whether malloc agreed to; None if not asked


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatus:
    """Where a rank is in its life (`ranks/<rank>/status.json`, replaced as it goes)."""

    rank: int
    host: str
    pid: int
    process_started_unix_s: float
    state: Literal["running", "done", "failed"]
    error: str | None = None
    # True where the error only reports that a peer went away: another rank is the cause
    secondary: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingResult:
    """What rank 0 says at the end (`result.json`)."""

    steps: int
    weights_sha256: str
    # L2 norm, per tensor, of (final - initial) weights: the scale that weight differences are
    # judged against
    update_l2: dict[str, float]
    parameters: int
    communication: dict[str, Any] = field(default_factory=dict)  # bucket sizes, transport details


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a trial ended (`outcome.json`); a trial without one is repeated by `run --resume`."""

    schema: int
    trial_id: str
    status: Literal["ok", "failed", "timed_out", "interrupted", "refused"]
    exit_code: int  # of Paceline, see errors.ExitCode
    launched_unix_s: float
    ended_unix_s: float
    launcher_exit_status: int | None
    failed_rank: int | None
    message: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pressure:
    """Time since boot for which tasks waited for a resource (Linux PSI: Documentation/accounting/
    psi.rst): some of them, and all of them at once. None where the kernel does not say."""

    some_s: float
    full_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskCounters:
    """One whole disk since boot."""

    read_bytes: int
    written_bytes: int
    busy_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkCounters:
    """One interface since boot."""

    sent_bytes: int
    received_bytes: int
    dropped_packets: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CgroupSample:
    """The control group that the watched processes are in, v1 or v2; None: it does not say."""

    cpu_limit_cores: float | None = None
    cpu_s: float | None = None
    throttled_s: float | None = None  # summed over its CPUs
    throttled_periods: int | None = None
    memory_limit_bytes: int | None = None
    memory_used_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSample:
    """One GPU, as NVML says; None: it does not."""

    name: str
    utilization_percent: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    power_watts: float | None = None
    sm_clock_hertz: float | None = None
    memory_clock_hertz: float | None = None
    temperature_celsius: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSample:
    """One tick of a host's sidecar (`hosts/<host>/trace.jsonl`).

    CPU shares are percent of all the host's cores over the time since the previous tick, None on
    the first. The `run_*` fields sum over the process trees that are watched for this trace. What
    has a default came later, or is not to be had everywhere.
    """

    unix_s: float
    cpu_user_percent: float | None
    cpu_system_percent: float | None
    cpu_idle_percent: float | None
    cpu_iowait_percent: float | None
    cpu_steal_percent: float | None
    cpu_other_percent: float | None  # nice, irq, softirq, guest
    iowait_valid: bool  # False where the kernel's counter ran backwards or means nothing
    ram_used_bytes: int
    ram_total_bytes: int
    swap_used_bytes: int
    disk_read_bytes: int | None  # since boot, all disks; None where the system does not say
    disk_write_bytes: int | None
    network_sent_bytes: int | None  # since boot, all interfaces
    network_received_bytes: int | None
    run_processes: int
    run_cpu_seconds: float  # CPU time since the watch began, ended children included
    run_cpu_percent: float | None
    run_rss_bytes: int
    run_pss_bytes: int | None  # None on ticks at which it is not read (it is costly)
    run_threads: int
    run_voluntary_context_switches: int | None  # None on ticks at which they are not read
    run_involuntary_context_switches: int | None
    sidecar_cpu_seconds: float  # the sidecar's own cost, since it started
    sidecar_rss_bytes: int
    cpu_seconds: dict[str, float] = field(default_factory=dict)  # since boot by state, as above
    core_busy_s: list[float] = field(default_factory=list)  # since boot, by core
    core_busy_percent: list[float] = field(default_factory=list)  # over the last tick, by core
    cpu_frequency_hertz: float | None = None  # mean over the cores
    load: list[float] = field(default_factory=list)  # averages over 1, 5 and 15 minutes
    pressure: dict[str, Pressure] = field(default_factory=dict)  # by resource: cpu, memory, io
    swap_total_bytes: int | None = None
    swapped_in_bytes: int | None = None  # since boot
    swapped_out_bytes: int | None = None
    minor_page_faults: int | None = None  # since boot
    major_page_faults: int | None = None
    disks: dict[str, DiskCounters] = field(default_factory=dict)
    networks: dict[str, NetworkCounters] = field(default_factory=dict)
    cgroup: CgroupSample | None = None
    temperatures_celsius: dict[str, float] = field(default_factory=dict)  # by sensor
    gpus: list[GpuSample] = field(default_factory=list)
    run_read_bytes: int | None = None  # from storage since the watch began; None where not readable
    run_written_bytes: int | None = None
    run_open_files: int | None = None  # None on ticks at which they are not counted
    sidecar_missed_ticks: int = 0  # since it started: beats that came too late to be kept


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSample:
    """One tick of one rank's process tree (`hosts/<host>/ranks.jsonl`).

    Counters run since the watch began, ended children included. What is costly is None on ticks at
    which it is not read.
    """

    unix_s: float  # that of the HostSample of the same tick
    rank: int
    pid: int
    processes: int
    cpu_seconds: float
    cpu_percent: float | None  # of one core over the last tick
    rss_bytes: int
    pss_bytes: int | None
    threads: int
    voluntary_context_switches: int | None
    involuntary_context_switches: int | None
    read_bytes: int | None  # from and to storage
    written_bytes: int | None
    open_files: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceGap:
    """A stretch without samples, in a trace between the rows around it: the sidecar died and was
    started again."""

    gap_started_unix_s: float  # the last sample before it
    gap_ended_unix_s: float
    reason: str
