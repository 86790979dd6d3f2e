"""One rank of a trial from rendezvous to result. Every launcher's job calls this.

Call `resources.apply_resources` first, then import this module (it imports torch).
"""

from __future__ import annotations

import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from paceline.data.reading import Feed, SoloNode
from paceline.errors import RankFailed
from paceline.host.memory import own_memory
from paceline.rank.checkpoints import Checkpoints, choose_checkpoint
from paceline.rank.evaluation import Evaluator
from paceline.rank.loop import Loop
from paceline.rank.memory_limit import limited_memory
from paceline.rank.peers import Peers, join_peers
from paceline.rank.replay import Replays
from paceline.rank.result import (
    End,
    local_buffers,
    write_environment,
    write_rank_weights,
    write_task_result,
)
from paceline.rank.samples import Samples, open_samples
from paceline.rank.spans import Spans
from paceline.records.attempts import continue_rows
from paceline.records.files import JsonlWriter, write_json
from paceline.records.rows import Replayed
from paceline.strategies import LocalStrategy, create_strategy
from paceline.torch_internals import compiler
from paceline.training.checkpointing import checkpoint_activations
from paceline.training.resources import set_threads
from paceline.training.tensors import save_tensors, sha256_by_name, sha256_of
from paceline.training.transforms import put_in_memory_format
from paceline.transports.recorder import recording
from paceline.workloads.build import build_model

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from paceline.plan.rank_context import RankContext
    from paceline.plan.trial import Trial
    from paceline.records.checkpoints import Checkpoint
    from paceline.records.layout import TrialFiles
    from paceline.records.rows import StepRow
    from paceline.training.task import Task
    from paceline.transports.recorder import Recorder


def train(trial: Trial, context: RankContext, files: TrialFiles) -> None:
    """Train the rank `context` of `trial`, and write the records to `files`.

    Collective over all ranks; every wait is limited by `trial.limits`. Raises PacelineErrors:
    EnvironmentLacks, DataError, TimedOut, RankFailed (PeerLost if another rank is the cause).
    """
    compiler.import_when_used()
    own = files.rank(context.rank)
    with Spans(own.spans) as spans, recording(own.communication) as recorder:
        spans.ended("imports", context.process_started_unix_s)
        set_threads(trial.placement.threads_per_worker)
        with spans("rendezvous"):
            peers = join_peers(context, trial)
        with peers.leaving():
            _TaskRank(trial, context, files, spans, peers, recorder).run()


@contextmanager
def _closing(strategy: LocalStrategy) -> Iterator[LocalStrategy]:
    """Close the strategy in any case; after an error, notify the peers that wait for this rank."""
    try:
        yield strategy
    except BaseException:
        strategy.close(failed=True)
        raise
    strategy.close(failed=False)


class _TaskRank:
    """The work of a rank between joining and leaving its peers."""

    def __init__(
        self,
        trial: Trial,
        context: RankContext,
        files: TrialFiles,
        spans: Spans,
        peers: Peers,
        recorder: Recorder,
    ) -> None:
        self._trial = trial
        self._context = context
        self._files, self._own = files, files.rank(context.rank)
        self._spans = spans
        self._peers = peers
        self._recorder = recorder
        self._replays: Replays | None = None  # of a trial that is compared with the baseline

    def run(self) -> None:
        with ExitStack() as opened:
            with limited_memory(self._trial.limits.rank_memory_mib, self._context.rank):
                with self._spans("data_load"):
                    samples = opened.enter_context(self._open_samples())
                    chosen = choose_checkpoint(self._trial, self._files, self._peers)
                    if chosen is not None:
                        samples = samples.since(chosen.steps)
                    feed = opened.enter_context(self._open_feed(samples))
                strategy = opened.enter_context(_closing(create_strategy(self._trial)))
                with self._spans("model_build"):
                    evaluator = self._evaluator(samples)
                    self._prepare(strategy, samples.task)
                    checkpoints = self._checkpoints(opened, strategy, samples, chosen)
                    if self._trial.save_tensors and self._trial.is_exact:
                        self._replays = self._new_replays(strategy, samples)
                self._continue(checkpoints)
                with self._spans("train"):
                    steps = self._train(strategy, samples, feed, evaluator, checkpoints)
                write_json(self._own.memory, own_memory())
                feed.close()  # replays open others
            with self._spans("bookkeeping"):
                self._finish(strategy, samples.task, steps)

    def _train(
        self,
        strategy: LocalStrategy,
        samples: Samples,
        feed: Feed,
        evaluator: Evaluator | None,
        checkpoints: Checkpoints | None,
    ) -> int:
        rank, order = self._context.rank, samples.order

        def between_steps(step: int, epoch: int) -> bool:
            took_time = self._replays is not None and self._replays.after_step(step + 1)
            if evaluator is None or not evaluator.is_due(step):
                return took_time
            with self._spans("evaluation"):
                evaluator.run(strategy, step, epoch, self._peers)
            return True

        def step_ended(row: StepRow) -> None:
            self._write_rows(strategy)
            if checkpoints is not None:
                checkpoints.step_ended(row)

        def updated(step: int) -> None:
            if checkpoints is not None:
                checkpoints.updated(step)

        loop = Loop(
            order,
            samples.task,
            strategy,
            rank,
            counts_samples=self._stage == 0,
            on_first_gradient=lambda: self._save_gradient(strategy, order.first_step),
            on_update=updated,
            on_step_end=step_ended,
        )
        steps = order.first_step + loop.run(feed, self._own, between_steps)
        self._write_rows(strategy)  # a server applies updates of other ranks after its last step
        if steps != order.steps:
            raise RankFailed(
                f"rank {rank}: expected {order.steps} steps, the data set's reader ended after "
                f"{steps}",
                rank,
            )
        return steps

    def _write_rows(self, strategy: LocalStrategy) -> None:
        """Write what was recorded since the last step."""
        self._recorder.flush()
        updates = strategy.updates()
        if updates:
            with JsonlWriter(self._own.updates) as rows:
                rows.write_all(updates)

    @property
    def _stage(self) -> int:
        return self._context.local_rank % self._trial.placement.stages

    def _open_samples(self) -> AbstractContextManager[Samples]:
        share = self._peers.node("files") or SoloNode()
        return open_samples(self._trial.training, self._files.root, share)

    def _open_feed(self, samples: Samples, purpose: str = "samples") -> Feed:
        context, place = self._context, self._trial.placement
        shares_on_node = context.ranks_on_node // place.stages
        return samples.feed(
            self._trial,
            rank=context.node_index * shares_on_node + context.local_rank // place.stages,
            world_size=place.nodes * shares_on_node,
            with_inputs=self._stage == 0,
            share_of_node=self._peers.node(purpose) or SoloNode(),
        )

    def _evaluator(self, samples: Samples) -> Evaluator | None:
        """Return the evaluator of this rank's share of the samples that are held out."""
        trial, context = self._trial, self._context
        if trial.training.evaluation is None:
            return None
        return Evaluator(
            trial,
            samples.task,
            samples.order,
            context,
            lambda: samples.held_out_feed(trial, context.rank, context.world_size),
            self._own.evaluations,
        )

    def _prepare(self, strategy: LocalStrategy, task: Task) -> None:
        """Build the model and set up the strategy, then write the actual environment."""
        trial, training = self._trial, self._trial.training
        model = build_model(task)
        initial = sha256_of(model.state_dict())
        put_in_memory_format(model, training.memory_format)
        checkpoint_activations(task, model, trial)
        strategy.prepare(task, model, self._context, trial, self._peers)
        del model  # a strategy may keep only a part of it
        write_environment(
            self._context, trial, self._own, initial, self._peers.clock, strategy.workers()
        )

    def _checkpoints(
        self,
        opened: ExitStack,
        strategy: LocalStrategy,
        samples: Samples,
        chosen: Checkpoint | None,
    ) -> Checkpoints | None:
        """Return the checkpoints of this rank; None if the trial has none."""
        if self._trial.checkpoint is None:
            return None
        found = Checkpoints(
            self._trial,
            self._context,
            self._files,
            samples.order,
            strategy,
            self._peers,
            chosen,
        )
        opened.callback(found.close)
        opened.enter_context(found.on_signal())
        return found

    def _continue(self, checkpoints: Checkpoints | None) -> None:
        """Restore the chosen checkpoint, and remove the records of steps that are repeated."""
        first_step = 0
        if checkpoints is not None and checkpoints.first_step:
            first_step = checkpoints.first_step
            with self._spans("restore"):
                checkpoints.restore()
        continue_rows(
            self._own,
            first_step,
            process_started_unix_s=self._context.process_started_unix_s,
            restored_unix_s=time.time(),
        )

    def _save_gradient(self, strategy: LocalStrategy, step: int) -> None:
        if step or not self._trial.save_tensors:
            return
        gradients = strategy.gradients()
        if self._context.is_first:
            save_tensors(self._files.gradient, gradients)

    def _new_replays(self, strategy: LocalStrategy, samples: Samples) -> Replays:
        return Replays(
            self._trial,
            self._context,
            self._files,
            samples,
            strategy,
            self._peers,
            self._open_feed,
        )

    def _finish(self, strategy: LocalStrategy, task: Task, steps: int) -> None:
        """Write what is compared: checksums of every rank, weights and result of the first one."""
        weights = strategy.state_dict()
        sums = [sha256_by_name(each) for each in (weights, *strategy.buffers_of_replicas())]
        unchanged = () if self._replays is None else self._replays.unchanged_after
        local = local_buffers(self._trial, task)
        sha256 = write_rank_weights(self._own, sums, local, unchanged)
        if not self._context.is_first:
            self._replay()
            return
        end = End(
            steps=steps,
            weights_sha256=sha256,
            strategy=strategy.describe(),
            transport=self._peers.describe(),
        )
        write_task_result(self._trial, self._files, end, task, weights, self._replay)

    def _replay(self) -> Replayed:
        if self._replays is None:
            return Replayed()
        with self._spans("replay"):
            return self._replays.run()
