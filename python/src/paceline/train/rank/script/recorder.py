"""The steps of a script's training, from torch's global optimiser hooks.

A step ends when the optimiser's step ends. Of several optimisers, the one that steps first defines
the steps. The first step begins with the first forward pass of a module: what comes before is
building the model.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.base.errors import RankFailed
from paceline.base.torch_internals import is_traced
from paceline.collectives.message_schedules import share_bounds
from paceline.collectives.recorder import Recorder
from paceline.measure.records.files import JsonlWriter, fields_of
from paceline.measure.records.layout import RankFiles
from paceline.measure.records.rows import StepRow
from paceline.plan.trials.trial import RankContext, Training
from paceline.train.rank.script.batches import BatchCounter
from paceline.train.rank.script.phases import (
    PhaseTimer,
    StepTimes,
    around_steps,
    has_closure,
    hooked,
)
from paceline.train.rank.script.program import EnoughSteps
from paceline.train.rank.script.step import report_to
from paceline.train.rank.spans import Spans

Report = tuple[float | Tensor | None, int | None]  # loss and samples


class TrainingRecorder:
    """Records the steps of this process's training.

    on_first_step: called once, with the optimiser, when the first gradient is complete and the
    weights are the first ones. Its time belongs to no step.
    """

    def __init__(
        self,
        training: Training,
        context: RankContext,
        files: RankFiles,
        operations: Recorder,
        on_first_step: Callable[[Optimizer], None],
        *,
        ends_diverged: bool = True,
        ends: bool = True,
    ) -> None:
        """ends_diverged: end the script if it reports a loss that is not finite. ends: end it after
        its last step.
        """
        self.steps = 0
        self.started_unix_s: float | None = None  # of the first step
        self.ended_unix_s: float | None = None  # of the last step
        self._rank = context.rank
        self._ends_diverged = ends_diverged
        self._max_steps = training.max_steps if ends else None
        self._samples, self._global_samples = _stated_samples(training, context)
        self._operations = operations
        self._on_first_step = on_first_step
        self._optimizer: Optimizer | None = None
        self._timer = PhaseTimer()
        self._batches = BatchCounter()
        self._unix_offset_s = time.time() - time.perf_counter()
        self._step_began_s = 0.0
        self._optimizer_began_s = 0.0
        self._times: StepTimes | None = None
        self._ended: dict[str, Any] | None = None  # the last step, whose report may still come
        self._report: Report | None = None  # of that step
        self._early_report: Report | None = None  # of the next step
        self._was_reported = False  # the step before
        self._file = files.steps
        self._rows: JsonlWriter

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record what happens while the context is active."""
        with ExitStack() as stack:
            self._rows = stack.enter_context(JsonlWriter(self._file))
            first = nn.modules.module.register_module_forward_pre_hook(self._first_forward)
            stack.enter_context(hooked(first))
            stack.enter_context(around_steps(self._before_step, self._after_step))
            self._first_hook = first
            stack.enter_context(self._timer.timing())
            stack.enter_context(self._batches.counting())
            stack.callback(report_to, None)
            stack.callback(self._write)
            report_to(self)
            yield

    def reported(self, loss: float | Tensor | None, samples: int | None) -> None:
        """Take the script's report: of the step that has ended, or, if that has one already, of the
        next one."""
        if self._ended is not None and self._report is None:
            self._report = (loss, samples)
            if self.steps == self._max_steps:
                raise EnoughSteps
        else:
            self._early_report = (loss, samples)

    @property
    def first_batch_sha256(self) -> str | None:
        """Checksum of this rank's first batch; None where the user states the samples."""
        return self._batches.first_sha256 if self._samples is None else None

    def record_spans(self, spans: Spans, started_unix_s: float) -> None:
        """Record building the model and training, as far as the script came.

        started_unix_s: of the script.
        """
        now_unix_s = time.time()
        first, last = self.started_unix_s, self.ended_unix_s
        spans.record("model_build", started_unix_s, now_unix_s if first is None else first)
        if first is not None:
            spans.record("train", first, now_unix_s if last is None else last)

    def _first_forward(self, module: nn.Module, _inputs: Any) -> None:
        # An export, an evaluation before the training, and a transform begin no step.
        if is_traced() or not torch.is_grad_enabled():
            return
        if next(module.parameters(), None) is None:
            return
        self._first_hook.remove()
        self._begin(time.perf_counter())

    def _begin(self, now_s: float) -> None:
        if self.started_unix_s is None:
            self.started_unix_s = now_s + self._unix_offset_s
        self._step_began_s = now_s
        self._timer.begin(now_s)

    def _before_step(
        self, optimizer: Optimizer, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Take the step's gradient: now, or after the closure that computes it (Lightning has one).

        Return the arguments of `step`, the optimiser included, where they change.
        """
        if not (has_closure(arguments, named) or self._batches.has_passed):
            return None  # the first step of a restored optimiser, which makes its state
        self._optimizer = self._optimizer or optimizer
        if optimizer is not self._optimizer:
            return None
        if self._max_steps is not None and self.steps >= self._max_steps:
            raise EnoughSteps
        self._write()
        self._times = None
        if len(arguments) > 1 and arguments[1] is not None:
            own = self._with_gradient(optimizer, arguments[1])
            return (arguments[0], own, *arguments[2:]), named
        if named.get("closure") is not None:
            return arguments, {**named, "closure": self._with_gradient(optimizer, named["closure"])}
        self._gradient_ready(optimizer)
        return None

    def _with_gradient(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        def call() -> Any:
            loss = closure()
            if self._times is None:  # an optimiser may call it several times
                self._gradient_ready(optimizer)
            return loss

        return call

    def _gradient_ready(self, optimizer: Optimizer) -> None:
        now_s = time.perf_counter()
        if self.started_unix_s is None:  # no module was called
            self._begin(now_s)
        operations = self._operations.ended()
        self._times = self._timer.end(now_s, operations, self._unix_offset_s)
        self._optimizer_began_s = now_s
        if self.steps == 0:
            self._on_first_step(optimizer)
            spent_s = time.perf_counter() - now_s
            self._step_began_s += spent_s
            self._optimizer_began_s += spent_s

    def _after_step(self, optimizer: Optimizer, _arguments: Any, _named: Any) -> None:
        if optimizer is not self._optimizer or self._times is None:
            return
        ended_s = time.perf_counter()
        times, step_s = self._times, ended_s - self._step_began_s
        optimizer_s = ended_s - self._optimizer_began_s
        self._ended = {
            "step": self.steps,
            "epoch": 0,  # unknown
            "started_unix_s": self._step_began_s + self._unix_offset_s,
            **fields_of(times),
            "optimizer_s": optimizer_s,
            "other_s": step_s - times.total_s - optimizer_s,
            "step_s": step_s,
            "samples": self._batches.take() if self._samples is None else self._samples,
        }
        self._report, self._early_report = self._early_report, None
        if self.steps == 0:
            self._batches.settle()
        self.steps += 1
        self.ended_unix_s = ended_s + self._unix_offset_s
        self._operations.flush()
        self._begin(ended_s)
        # A script that reports after each step also reports the last one.
        if self.steps == self._max_steps and (self._report is not None or not self._was_reported):
            raise EnoughSteps

    def _write(self) -> None:
        """Write the row of the step that has ended, with the script's report if there is one."""
        if self._ended is None:
            return
        ended, self._ended = self._ended, None
        self._was_reported = self._report is not None
        reported, self._report = self._report or (None, None), None
        loss, samples = (None if reported[0] is None else float(reported[0])), reported[1]
        if loss is not None and not math.isfinite(loss) and self._ends_diverged:
            raise RankFailed(
                f"rank {self._rank}: the script reports a loss of {loss} in step {ended['step']}, "
                "expected a finite number: the training diverged",
                self._rank,
            )
        counted = ended.pop("samples")
        samples = counted if samples is None else samples
        self._rows.write(
            StepRow(
                **ended,
                samples=samples,
                global_samples=self._global_samples,
                loss_sum=_loss_sum(loss, samples),
            )
        )


def _loss_sum(loss: float | None, samples: int | None) -> float | None:
    if loss is None or not math.isfinite(loss):
        return None
    return loss * (1 if samples is None else samples)


def _stated_samples(training: Training, context: RankContext) -> tuple[int | None, int | None]:
    """Return this rank's share of the samples that the user states for a step, and all of them."""
    assert training.script is not None
    stated = training.script.samples_per_step
    if stated is None:
        return None, None
    low, high = share_bounds(stated, context.rank, context.world_size)
    return high - low, stated
