"""Record this process as one rank of a trial, while it runs the script of the user by itself.

The command of the user becomes a trial, so that everything that reads trials can read its records.
The variables of its launcher say which rank a process is.

Two things of the training are changed, to record operations: the back end "gloo" is wrapped, and
where torch uses NCCL, methods of its classes note the calls. The end of the process ends the
records.
"""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from paceline.base.errors import EnvironmentLacks, UsageError
from paceline.collectives.gloo_group import BACKEND
from paceline.collectives.host import host_name
from paceline.measure.records.documents import (
    begin_attempt,
    continue_rows,
    failure_of,
    read_status,
    write_trial,
)
from paceline.measure.records.files import write_json
from paceline.measure.records.layout import RunFiles, TrialFiles
from paceline.plan.spec.extensions import TRANSPORTS
from paceline.plan.spec.loading import load_spec
from paceline.plan.spec.models import SCHEMA, name_of_script
from paceline.plan.spec.values import BASELINE
from paceline.plan.trials.planning import plan_trials
from paceline.plan.trials.trial import Trial
from paceline.runner.job import Job, RankContext, rank_context, say
from paceline.runner.job.context import is_launcher, launching_pid
from paceline.runner.job.rank import host_sidecar
from paceline.runner.job.rank_status import RankStatusFile
from paceline.runner.job.stacks import answer_requests, write_error
from paceline.train.rank.loop import End, write_script_result
from paceline.train.rank.script.process_group import recorded_groups
from paceline.train.rank.script.recorder import TrainingRecorder
from paceline.train.rank.spans import Spans, recording
from paceline.train.training.resources import actual_environment

_NOT_COMPARED = "it was recorded beside its own launcher, without a baseline"


def record(folder: Path) -> None:
    """Record this process from now to its end into the folder of a trial.

    Does nothing in a launcher, in a helper process of a rank, and for a rank whose training is
    recorded already. Raises EnvironmentLacks if the ranks are on several hosts.
    """
    if is_launcher(os.getpid()):
        return
    place, files = own_place(), TrialFiles(folder)
    before = read_status(files.rank(place.rank))
    if before is not None and (
        before.state == "done" or (before.is_alive() and before.pid != os.getpid())
    ):
        return
    cores = len(os.sched_getaffinity(launching_pid()))
    trial = planned_trial(files, place, cores)
    job = Job(trial=trial, files=files, run=RunFiles(folder.parent.parent))
    context = rank_context(place.rank, [host_name()] * place.ranks, None)
    _AttachedRank(job, context).begin()


class _AttachedRank:
    """The records of this process."""

    def __init__(self, job: Job, context: RankContext) -> None:
        self._job, self._context = job, context
        self._own = job.files.rank(context.rank)
        self._pid = os.getpid()
        self._trial = job.trial
        self._status = RankStatusFile(job, context)
        self._recording = ExitStack()
        self._spans: Spans
        self._training: TrainingRecorder
        self._parameters = 0
        self._began_unix_s = time.time()
        self._error: BaseException | None = None

    def begin(self) -> None:
        """Begin to record; end it at the exit of Python."""
        started_unix_s = self._context.process_started_unix_s
        begin_attempt(self._own)
        continue_rows(
            self._own, 0, process_started_unix_s=started_unix_s, restored_unix_s=time.time()
        )
        if self._context.is_first:
            write_trial(self._trial, self._job.files)
        self._status.write("running")
        answer_requests(self._own)
        with ExitStack() as stack:
            stack.enter_context(host_sidecar(self._job, self._context, [launching_pid()]))
            self._spans = stack.enter_context(Spans(self._own.spans))
            self._spans.ended("imports", started_unix_s)
            stack.callback(self._write_end)  # all records but the spans are complete then
            operations = stack.enter_context(
                recording(self._own.communication, self._own.operations)
            )
            self._training = TrainingRecorder(
                self._trial.training,
                self._context,
                self._own,
                operations,
                self._first_step,
                ends_diverged=False,
            )
            stack.enter_context(recorded_groups())
            stack.enter_context(self._training.recording())
            self._recording = stack.pop_all()
        self._show_error = sys.excepthook
        sys.excepthook = self._note_error
        atexit.register(self._end)

    def _note_error(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        self._error = error
        self._show_error(kind, error, trace)

    def _first_step(self, optimizer: Optimizer) -> None:
        try:
            self._describe(optimizer)
        except Exception as error:  # noqa: BLE001  (the training goes on)
            say(f"rank {self._context.rank} is not described: {type(error).__name__}: {error}")

    def _describe(self, optimizer: Optimizer) -> None:
        """Record what is known when the first gradient is complete."""
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        self._parameters = sum(each.numel() for each in parameters)
        self._trial = trial_as_found(
            self._trial,
            backend=dist.get_backend() if dist.is_initialized() else None,
            device="cuda" if any(each.is_cuda for each in parameters) else "cpu",
            threads=torch.get_num_threads(),
        )
        if self._context.is_first:
            write_trial(self._trial, self._job.files)
        environment = actual_environment(
            self._context, self._trial, clock_offset_s=0.0, clock_error_s=0.0
        )
        batch = self._training.first_batch_sha256
        write_json(self._own.environment, replace(environment, first_batch_sha256=batch))

    def _end(self) -> None:
        if os.getpid() != self._pid:
            return  # a child that the script has forked
        try:
            self._recording.close()
        except OSError as error:  # a full disk must not hide how the script ended
            say(f"rank {self._context.rank}: its records are not complete: {error}")

    def _write_end(self) -> None:
        """Write the result and the end of this rank; a process without a step leaves nothing."""
        if not self._training.steps and self._error is None:
            shutil.rmtree(self._own.root)
            return
        self._training.record_spans(self._spans, self._began_unix_s)
        if self._training.steps and self._context.is_first:
            write_script_result(
                self._trial,
                self._job.files,
                End(steps=self._training.steps, weights_sha256=""),
                parameters=self._parameters,
                moved={},
                not_compared=_NOT_COMPARED,
            )
        if self._error is None:
            self._status.write("done")
        else:
            write_error(self._own, self._error)
            failure = failure_of(self._error, self._context.rank, self._context.host)
            self._status.write("failed", failure)


_GLOO = "gloo"
# The transport of a back end of torch.distributed that has another name.
_OTHER_NAMES = {BACKEND: _GLOO, "mpi4py": "mpi"}
_OF_CUDA = "nccl"  # where a group has a back end for each device; that of the CPU is gloo


def planned_trial(files: TrialFiles, place: AttachedRank, cores: int) -> Trial:
    """Return this process's script as a trial, before its training begins.

    Transport, device and threads are guesses; `trial_as_found` corrects them. cores: that its ranks
    may use.
    """
    script = getattr(sys.modules["__main__"], "__file__", None) or sys.argv[0] or "script"
    if place.ranks > 1:
        layout = {"local_strategy": "processes", "ranks_per_node": place.ranks, "transport": _GLOO}
    else:
        layout = {"local_strategy": "intraop"}
    own = {"launcher": place.launcher, "threads_per_rank": 1, "oversubscribe": True, **layout}
    spec: dict[str, Any] = {
        "schema": SCHEMA,
        "name": name_of_script(script),
        "repeats": 1,
        "workloads": [{"script": script, "arguments": sys.argv[1:]}],
        "trials": [dict(BASELINE), own],
    }
    planned = plan_trials(load_spec(spec).experiment, {}, cores)
    [trial] = [each for each in planned if not each.is_baseline]
    placement = trial.placement.model_copy(update={"allocated_cores": cores})
    return trial.model_copy(update={"id": files.root.name, "placement": placement})


def trial_as_found(trial: Trial, *, backend: str | None, device: str, threads: int) -> Trial:
    """Return the trial with what is known when its first gradient is complete.

    backend: of the script's default process group; None without one. threads: of each rank.
    Raises UsageError for a back end that Paceline does not know.
    """
    found: dict[str, Any] = {
        "device": device,
        "placement": trial.placement.model_copy(update={"threads_per_rank": threads}),
    }
    if backend is not None and trial.placement.ranks > 1:
        transport = _transport(backend, device)
        found["transport"] = transport
        found["transport_options"] = TRANSPORTS.get(transport).Options()
    return trial.model_copy(update=found)


def _transport(backend: str, device: str) -> str:
    if backend in _OTHER_NAMES:
        return _OTHER_NAMES[backend]
    if backend in {each.name for each in TRANSPORTS.all()}:
        return backend
    if backend in ("undefined", "custom") or ":" in backend:
        return _GLOO if device == "cpu" else _OF_CUDA
    raise UsageError(
        f"expected a process group of gloo, mpi4py, nccl, got {backend}; the run says gloo"
    )


# rank, number of ranks, number of ranks on this host
_VARIABLES = (
    ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),  # torchrun, and scripts in its style
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),  # Open MPI
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),  # MPICH
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachedRank:
    """A rank among the ranks of a command."""

    launcher: str
    rank: int
    ranks: int


def own_place(environment: Mapping[str, str] = os.environ) -> AttachedRank:
    """Return the place of this process; rank 0 of 1 if no launcher has given it one.

    Raises EnvironmentLacks if the ranks are on several hosts.
    """
    for rank, ranks, local_ranks in _VARIABLES:
        if rank not in environment or ranks not in environment:
            continue
        count, here = int(environment[ranks]), int(environment.get(local_ranks, environment[ranks]))
        if here != count:
            raise EnvironmentLacks(
                f"expected all ranks on this host, found {here} of {count}; use `paceline run` "
                "for several hosts"
            )
        return AttachedRank(
            launcher=_launcher(environment), rank=int(environment[rank]), ranks=count
        )
    return AttachedRank(launcher="local", rank=0, ranks=1)


def _launcher(environment: Mapping[str, str]) -> str:
    if "TORCHELASTIC_RUN_ID" in environment:
        return "torchrun"
    is_mpi = "OMPI_COMM_WORLD_SIZE" in environment or "PMI_SIZE" in environment
    return "mpi" if is_mpi else "local"
