"""Rows and documents in a run directory.

Field names contain units. Fields named `_unix_s` are seconds since the epoch on the clock of the
host that wrote them; other `_s` fields are durations. A missing measurement is None, never 0.
Fields are only added. SCHEMA increases when the meaning of a field changes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from paceline.collectives.host import Process
from paceline.measure.records.communication import Communication

SCHEMA = 2

SpanName = Literal[
    "imports",  # interpreter start to all modules imported
    "rendezvous",  # process group, clock offsets
    "data_load",  # opening the data set, decoding in `memory` mode
    "model_build",  # initial weights, wrapping
    "restore",  # reading a checkpoint
    "train",  # first step's start to last step's end, evaluations included
    "evaluation",  # one evaluation, within "train"
    "bookkeeping",  # tensors and results written
    "replay",  # steps for the comparison with the baseline, within "bookkeeping"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanRow:
    """One part of a rank's lifetime (`ranks/<rank>/spans.jsonl`)."""

    name: SpanName
    started_unix_s: float
    ended_unix_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """One training step of one rank (`ranks/<rank>/steps.jsonl`).

    data_wait_s + forward_s + backward_s + bubble_s + comm_s + pass_comm_s + optimizer_s + other_s =
    step_s.
    In a pipeline, the samples are counted by the first stage and the loss by the last.
    Of a user's script, samples, loss and phases may be unknown (None).
    Exposed communication is `comm_s`, from the rank's last gradient being ready to all gradients
    averaged, and `pass_comm_s`, in which layers waited for other ranks before that.
    `comm_ready_unix_s` is when this rank's last gradient was ready; the analysis splits both with
    it into waiting for the slowest rank and transfer. All are None without peers.
    `comm_ended_unix_s` is when the last part of `comm_s` ended, if the rank computed between its
    parts; None if they followed one another.
    """

    step: int  # global step, from 0
    epoch: int  # from 0
    started_unix_s: float
    samples: int | None  # this rank's share of the global batch, padding not counted
    global_samples: int | None  # the whole global batch
    # sum of the per-sample losses of this rank's share; without samples, the loss as reported
    loss_sum: float | None
    data_wait_s: float | None
    forward_s: float | None
    backward_s: float | None
    comm_s: float | None
    comm_ready_unix_s: float | None
    optimizer_s: float
    other_s: float
    step_s: float
    bubble_s: float | None = None  # a stage's waiting for its neighbours; None without a pipeline
    pass_comm_s: float | None = None  # None without layers that communicate
    comm_ended_unix_s: float | None = None


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
    algorithm: str | None  # chosen algorithm; None where there is no choice
    payload_bytes: int  # of this rank's tensors
    arrived_unix_s: float  # when this rank requested it
    started_unix_s: float | None  # start, where operations of a group queue
    ended_unix_s: float
    sent_bytes: int | None  # by this rank to others; None where the transport does not count
    sent_messages: int | None
    # whether the rank did nothing else until it ended, for example in batch normalisation
    awaited: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRow:
    """One metric of one evaluation on one rank (`ranks/<rank>/evaluations.jsonl`).

    The metric is the mean over its elements of sum / count, both over all ranks.
    """

    steps: int  # optimiser steps before the evaluation
    epoch: int  # of the last of them
    metric: str
    sums: list[float]  # over this rank's samples, shape (elements,)
    counts: list[float]  # the same shape
    started_unix_s: float
    ended_unix_s: float  # without waiting for the other ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRow:
    """One event of an update of weights without a barrier (`ranks/<rank>/updates.jsonl`).

    The rank that computed an update writes `pushed`. Each rank that owns a shard of the weights
    writes `applied`. The numbers show whether an update was lost or applied twice.
    """

    event: Literal["pushed", "applied"]
    worker: int  # rank that computed the update
    sequence: int  # of its updates, from 0
    step: int  # last step whose gradient it includes, from 0
    shards: int | None = None  # ranks that must apply it; of `pushed`
    # updates of the shard between the fetch of the weights and this one; of `applied`
    staleness: int | None = None
    lead_steps: int | None = None  # steps of the worker beyond the slowest one; of `applied`


def own_update(
    *, worker: int, sequence: int, step: int, staleness: int, lead_steps: int | None = None
) -> list[UpdateRow]:
    """Return the rows of an update that the rank which computed it has applied itself."""
    update = partial(UpdateRow, worker=worker, sequence=sequence, step=step)
    return [
        update(event="pushed", shards=1),
        update(event="applied", staleness=staleness, lead_steps=lead_steps),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleLogRow:
    """Samples of a rank in a step (`ranks/<rank>/sample_log.jsonl`)."""

    step: int
    epoch: int
    sample_ids: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRow:
    """One checkpoint of one rank (`ranks/<rank>/checkpoints.jsonl`)."""

    steps: int  # optimiser steps done before
    started_unix_s: float
    # by which the training waited: for the copy, and for the checkpoint before
    blocked_s: float
    ended_unix_s: float  # when it was on disk, or failed
    written_bytes: int | None  # by this rank; None if it failed
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ContinuationRow:
    """A start of a rank after a failure (`ranks/<rank>/continuations.jsonl`).

    Step rows after `resumed_steps` of the attempt before are removed: these steps are repeated.
    """

    before_started_unix_s: float | None  # of the process of the attempt before
    before_state: str | None  # its last state; "running" if it was killed
    before_state_unix_s: float | None  # when it wrote that
    before_steps: int  # optimiser steps that it had done
    before_ended_unix_s: float | None  # end of the last of them
    process_started_unix_s: float  # of this attempt
    resumed_steps: int  # steps of the checkpoint; 0 without one
    restored_unix_s: float  # when the state had been restored


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureRow:
    """A failed attempt after which the trial was started again (`failures.jsonl`).

    The program that starts the ranks again writes it. torchrun's agent has no record.
    """

    detected_unix_s: float  # when a failed process or rank was noticed
    ended_unix_s: float  # when no process of the attempt was left
    failed_rank: int | None
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class InjectedFailureRow:
    """A failure that the run itself has caused (`injected.jsonl`)."""

    unix_s: float
    rank: int  # that was killed, alone or with its executor or host
    kind: str = "rank"  # see spec.tables.FailureKind


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEnvironment:
    """Resources that a thread with its own replica really had."""

    worker: int  # within its rank
    thread_id: int  # the kernel's
    intraop_threads: int
    affinity: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnvironment:
    """Resources that a rank really had (`ranks/<rank>/environment.json`), read back by the rank."""

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
    numa_nodes: list[int] = field(default_factory=list)  # of the cores in `affinity`; [] if unknown
    dilation: int = 1  # how many times slower time runs for a host that takes turns
    link: str | None = None  # rate of the host's link, in a lab that limits it
    workers: list[WorkerEnvironment] = field(default_factory=list)  # threads with replicas
    # of a script's rank; equal on ranks that hold the same samples, as in tensor parallel
    first_batch_sha256: str | None = None
    keeps_freed_memory: bool | None = (
        None  # whether malloc accepted the setting; None if not requested
    )
    float32_matmul_precision: str = "highest"  # of torch


# Kind of the failure of a rank that was ended from outside.
TERMINATED = "Terminated"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The error with which a rank ended: written by itself, or by the program that started it."""

    kind: str  # class of the error: "DataError"
    message: str
    rank: int
    host: str | None  # of the rank; None if the writer does not know it
    unix_s: float | None = None  # when it was written; None in records of older versions

    @property
    def was_asked_to_end(self) -> bool:
        """The rank was ended from outside. Its launcher may know why."""
        return self.kind == TERMINATED

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatus:
    """State of a rank (`ranks/<rank>/status.json`, replaced at each change)."""

    rank: int
    host: str
    pid: int
    process_started_unix_s: float
    state: Literal["running", "done", "failed"]
    error: Failure | None = None
    # True if the error only reports that a peer left: another rank is the cause
    secondary: bool = False
    # with pid, they identify the process; None in records of older versions
    start_ticks: int | None = None
    boot_id: str | None = None

    @property
    def process(self) -> Process | None:
        """The process that the rank is; None if the record does not identify it."""
        if self.start_ticks is None or self.boot_id is None:
            return None
        return Process(self.pid, self.start_ticks, self.boot_id)

    def is_alive(self) -> bool:
        """Return whether the process of the rank runs. Call it on the rank's host."""
        return self.process is not None and self.process.is_alive()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWeights:
    """Final weights of the replicas on one rank (`ranks/<rank>/weights.json`)."""

    # SHA-256 by tensor: of the whole model, then of the buffers of each replica, if they have some
    replicas: list[dict[str, str]]
    local: list[str]  # buffers that each replica has of its own by definition
    # steps after which a sample of this rank's weights was the same as before; None without one
    unchanged_after: list[int] | None = None


@dataclass(slots=True, kw_only=True)
class Replayed:
    """Results of replaying steps after a training, by point; see records.comparison_points."""

    moved_l2: dict[str, dict[str, float]] = field(default_factory=dict)  # of a baseline, by tensor
    # of a baseline: largest relative change of a tensor when the inputs change by 2^-20
    rounding: dict[str, float] = field(default_factory=dict)
    # of a baseline: tensors whose gradient is nothing but roundings, and buffers that follow them
    noise: list[str] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)  # why it was not replayed
    faults: dict[str, str] = field(default_factory=dict)  # why it could not begin as the baseline


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingResult:
    """Result of a training, written by rank 0 at the end (`result.json`)."""

    steps: int
    weights_sha256: str
    # L2 norm, per tensor, of (final - initial) weights: the scale that weight differences are
    # judged against
    update_l2: dict[str, float]
    parameters: int
    linear_parameters: int | None = None  # of them in linear layers; None for a script
    communication: Communication = field(default_factory=Communication)
    replayed: Replayed = field(default_factory=Replayed)
    gradient_sensitivity: float | None = None  # rounding of the first gradient, of older versions
    not_compared: str | None = None  # why its tensors cannot be compared; None if they can
    # of the data set, as the task knew them; None for a script
    classes: int | None = None
    input_shape: list[int] | None = None  # of a stored sample; [] for images of any size
    input_dtype: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TouchedFilesRow:
    """Paths that the rank of a script has used (`touched_files.json`).

    read_changed_ns: files that were written in the run and read before the first step, and when
    each was changed. made: new files and folders; a folder stands for all that is in it.
    """

    read_changed_ns: dict[str, int]
    made: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """End of a trial (`outcome.json`). `run --resume` repeats a trial without one."""

    schema: int
    trial_id: str
    status: Literal["ok", "failed", "timed_out", "interrupted", "refused"]
    exit_code: int  # of Paceline, see errors.ExitCode
    launched_unix_s: float
    ended_unix_s: float
    launcher_exit_status: int | None
    failed_rank: int | None
    message: str | None
    # of the rank that failed first, if a record has it; None in records of older versions, too
    error: Failure | None = None
    # CPU time that others took while the ranks trained, in percent of all cores of the busiest
    # machine: processes that do not belong to the trial, and the hypervisor. None if not measured
    others_percent: float | None = None
    stolen_percent: float | None = None
    machine_cores: int | None = None  # None in records of older versions, too
    beside_others: bool = False  # the sum was above the limit

    @property
    def reason(self) -> str:
        """The first line of the message: which trial failed, and why."""
        message = self.message or f"trial {self.trial_id}: {self.status}"
        return message.partition("\n")[0]
