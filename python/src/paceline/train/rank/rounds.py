"""The worker of a process that runs tasks of rounds: it keeps the model and one rank's samples.

Call `resources.apply_resources` first, then import this module (it imports torch).
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.base.errors import RankFailed
from paceline.base.torch_internals import compiler
from paceline.collectives.recorder import payload_bytes
from paceline.measure.records.files import JsonlWriter
from paceline.measure.records.layout import TrialFiles
from paceline.measure.records.rows import StepRow
from paceline.measure.records.virtual_clock import run_in_turns
from paceline.plan.costs import all_reduce_bytes
from paceline.plan.trials.trial import RankContext, Trial
from paceline.train.data.batches import Batch, Feed, SoloNode
from paceline.train.rank.loop import (
    End,
    Loop,
    local_buffers,
    write_environment,
    write_rank_weights,
    write_task_result,
)
from paceline.train.rank.round_exchange import (
    Carry,
    Orders,
    RankReport,
    Report,
    RoundExchange,
    State,
    set_clock,
    steps_of_round,
    write_exchange,
)
from paceline.train.rank.samples import Samples, open_samples
from paceline.train.rank.spans import Spans
from paceline.train.strategies.descriptors import ProcessesOptions
from paceline.train.strategies.local_sgd import LocalReplica
from paceline.train.training.checkpointing import checkpoint_activations
from paceline.train.training.resources import RankCores, set_threads
from paceline.train.training.task import put_in_memory_format
from paceline.train.training.tensors import sha256_by_name, sha256_of
from paceline.train.workloads.build import build_model


@dataclass(frozen=True, slots=True)
class _Batches:
    """The remaining batches of a rank."""

    rank: int
    feed: Feed
    batches: Iterator[Batch]


class RoundWorker:
    """The first task of a trial in this process creates it. It is not thread-safe."""

    def __init__(self, trial: Trial, context: RankContext, files: TrialFiles) -> None:
        """context: of the first rank of this process; the process keeps that rank's cores."""
        compiler.import_when_used()
        self._trial = trial
        self._context = context
        self._files = files
        self._batches: _Batches | None = None
        self._opened = ExitStack()
        self._samples: Samples
        self._replica: LocalReplica
        self._initial_sha256 = ""
        set_threads(trial.placement.threads_per_worker)

    @property
    def rank(self) -> int | None:
        """Return the rank whose samples are loaded."""
        return None if self._batches is None else self._batches.rank

    def begin(self) -> None:
        """Open what the first task of a rank needs, and record the time."""
        rank = self._context.rank
        own = self._files.rank(rank)
        with Spans(own.spans) as spans:
            spans.ended("imports", self._context.process_started_unix_s)
            with spans("data_load"):
                self._open()
                self._open_samples(rank, 0)
            with spans("model_build"):
                self._build()
                write_environment(self._context, self._trial, own, self._initial_sha256)

    def resume(self) -> None:
        """Do the same in a process that joins later; the time is part of a round's exchange."""
        self._open()
        self._build()

    def run(self, rank: int, orders: Orders, state: Callable[[], State | None]) -> Report:
        """Take the steps of a round as `rank`, starting from `state`.

        state: returns the averaged state, None for the initial one; called when the samples are
        loaded. Raises the errors of Loop.run, DataError for a damaged image.
        """
        steps = steps_of_round(orders.number, self._period, self._samples.order.steps)
        moved = self._open_samples(rank, steps.start)
        began_s = self._begin_round(rank, orders, state())
        run_in_turns()
        assert self._batches is not None
        loop = Loop(
            order=self._samples.order,
            task=self._samples.task,
            strategy=self._replica,
            rank=rank,
            counts_samples=True,
        )
        batches = itertools.islice(self._batches.batches, len(steps))
        rows = self._record(rank, loop, batches, began_s)
        if [row.step for row in rows] != list(steps):
            raise RankFailed(
                f"rank {rank}: expected steps {steps.start} to {steps.stop - 1}, the data set's "
                f"reader gave {[row.step for row in rows]}",
                rank,
            )
        carry = self._carry(rows, orders.carries.get(rank))
        share = sum(r.samples or 0 for r in rows) / sum(r.global_samples or 0 for r in rows)
        return self._report(rank, carry, steps.stop, scaled_state(self._replica, share), moved)

    def finish(self, rank: int, orders: Orders, state: Callable[[], State | None]) -> Report:
        """Load the last averaged weights and write the last records of `rank`."""
        carry = orders.carries[rank]
        own = self._files.rank(rank)
        self._begin_round(rank, orders, state())
        with Spans(own.spans) as spans:
            spans.ended("train", carry.train_started_unix_s)
            with spans("bookkeeping"):
                local = local_buffers(self._trial, self._samples.task)
                sums = sha256_by_name(self._replica.state_dict())
                sha256 = write_rank_weights(own, [sums], local)
                if rank in orders.clocks:
                    set_clock(own, orders.clocks[rank])
                if rank == 0:
                    self._write_result(orders, sha256)
        if self.rank == rank:
            self.close()
            self._opened.close()
        steps = self._samples.order.steps
        return self._report(rank, None, steps, None, moved=False)

    def close(self) -> None:
        """Release the samples."""
        if self._batches is not None:
            self._batches.feed.close()
            self._batches = None

    @property
    def _period(self) -> int:
        averaging = self._trial.options_as(ProcessesOptions).averaging
        assert averaging is not None, "planning gives every trial of spark-rounds a period"
        return averaging.period_steps

    def _open(self) -> None:
        # Tasks do not wait for each other, so they share neither copies nor decoded samples.
        self._samples = self._opened.enter_context(
            open_samples(self._trial.training, self._files.root, SoloNode())
        )

    def _build(self) -> None:
        training = self._trial.training
        model = build_model(self._samples.task)
        self._initial_sha256 = sha256_of(model.state_dict())
        put_in_memory_format(model, training.memory_format)
        checkpoint_activations(self._samples.task, model, self._trial)
        self._replica = LocalReplica(self._samples.task, model, self._trial)

    def _open_samples(self, rank: int, first_step: int) -> bool:
        """Open `rank`'s batches from `first_step`; return whether the rank has moved here."""
        if self._batches is not None and self._batches.rank == rank:
            return False
        self.close()
        feed = self._samples.feed(self._trial, rank=rank, world_size=self._trial.placement.ranks)
        later = itertools.dropwhile(lambda batch: batch.step < first_step, iter(feed))
        self._batches = _Batches(rank, feed, later)
        return first_step > 0

    def _begin_round(self, rank: int, orders: Orders, state: State | None) -> float:
        """Load the averaged state, which ends the exchange; return the time (perf_counter).

        The exchange belongs to the step before it, whose row is completed now.
        """
        if state is not None:
            load_state(self._replica, state)
        ended_unix_s, ended_s = time.time(), time.perf_counter()
        carry = orders.carries.get(rank)
        if carry is not None:
            write_exchange(
                self._files.rank(rank),
                carry.last_step,
                RoundExchange(
                    number=orders.number - 1,
                    ranks=self._trial.placement.ranks,
                    state_bytes=state_bytes(self._replica),
                    ended_unix_s=ended_unix_s,
                ),
            )
        return ended_s

    def _record(
        self, rank: int, loop: Loop, batches: Iterator[Batch], began_s: float
    ) -> list[StepRow]:
        """Take the steps. Write all rows except the last, which still lacks the exchange."""
        files = self._files.rank(rank)
        taken: list[StepRow] = []
        with JsonlWriter(files.steps) as rows, JsonlWriter(files.sample_log) as sample_log:
            for row, seen in loop.steps(batches, began_s):
                if taken:
                    rows.write(taken[-1])
                sample_log.write(seen)
                taken.append(dataclasses.replace(row, comm_s=0.0))
        return taken

    def _carry(self, rows: list[StepRow], before: Carry | None) -> Carry:
        context = self._context
        if before is not None:
            return dataclasses.replace(before, host=context.host, last_step=rows[-1])
        return Carry(
            host=context.host,
            process_started_unix_s=context.process_started_unix_s,
            train_started_unix_s=rows[0].started_unix_s,
            last_step=rows[-1],
        )

    def _report(
        self,
        rank: int,
        carry: Carry | None,
        next_step: int,
        total: State | None,
        moved: bool,
    ) -> Report:
        report = RankReport(
            host=self._context.host,
            cores=RankCores.own().to_json(),
            carry=carry,
            next_step=next_step,
            steps=self._samples.order.steps,
            moved=moved,
        )
        return Report(ranks={rank: report}, total=total)

    def _write_result(self, orders: Orders, sha256: str) -> None:
        end = End(
            steps=self._samples.order.steps,
            weights_sha256=sha256,
            strategy={
                "period": self._period,
                "momentum": None if self._replica.momentum is None else "averaged",
                "round_bytes": state_bytes(self._replica),
                # sent by a rank; the driver sends the broadcast back
                "sent_bytes_per_step": round(state_bytes(self._replica) / self._period),
                "uncompressed_bytes_per_step": round(
                    all_reduce_bytes(payload_bytes(self._replica.weights), self._context.world_size)
                ),
                **orders.facts,
            },
        )
        weights = self._replica.state_dict()
        task = self._samples.task
        write_task_result(self._trial, self._files, end, task, weights, build_model(task))


def scaled_state(replica: LocalReplica, share: float) -> State:
    """Return the replica's state times `share`, as a new array."""
    return torch.cat(_parts(replica)).mul_(share).numpy()


def load_state(replica: LocalReplica, state: State) -> None:
    """Load an averaged state, in the layout of `scaled_state`, into the replica."""
    parts = _parts(replica)
    averaged = torch.split(torch.from_numpy(state), [part.numel() for part in parts])
    for part, values in zip(parts, averaged, strict=True):
        part.copy_(values)


def state_bytes(replica: LocalReplica) -> int:
    """Return the bytes that a task sends in a round, and receives."""
    return sum(part.nbytes for part in _parts(replica))


def _parts(replica: LocalReplica) -> list[Tensor]:
    return [replica.weights, *([] if replica.momentum is None else [replica.momentum])]
