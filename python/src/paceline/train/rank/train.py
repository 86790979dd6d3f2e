"""One rank of a trial from rendezvous to result. Every launcher's job calls this.

Call `resources.apply_resources` first, then import this module (it imports torch).
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from paceline.base.errors import EnvironmentLacks, PacelineError, RankFailed
from paceline.base.host.memory import limited_private_memory, own_memory
from paceline.base.torch_internals import compiler
from paceline.collectives.recorder import Recorder
from paceline.measure.records.documents import Checkpoint, continue_rows
from paceline.measure.records.files import JsonlWriter, write_json
from paceline.measure.records.layout import RankFiles, TrialFiles
from paceline.measure.records.rows import Replayed, StepRow
from paceline.measure.records.sources import write_sources
from paceline.measure.records.virtual_clock import (
    own_dilation,
    run_in_turns,
    run_together_again,
)
from paceline.plan.spec.extensions import STRATEGIES
from paceline.plan.trials.trial import RankContext, Trial
from paceline.train.data.batches import Feed
from paceline.train.rank.checkpoints import Checkpoints, choose_checkpoint
from paceline.train.rank.evaluation import Evaluator
from paceline.train.rank.loop import (
    End,
    Loop,
    local_buffers,
    write_environment,
    write_rank_weights,
    write_task_result,
)
from paceline.train.rank.peers import Peers, join_peers
from paceline.train.rank.repeated_steps import StepRepeater
from paceline.train.rank.replay import StateKeeper, StepReplay, begin_replay
from paceline.train.rank.samples import Samples, open_samples
from paceline.train.rank.spans import Spans, recording
from paceline.train.strategies import LocalStrategy, create_strategy
from paceline.train.training.checkpointing import checkpoint_activations
from paceline.train.training.compilation import compiler_settings
from paceline.train.training.file_memory import FileMemory
from paceline.train.training.resources import return_freed_memory, set_threads
from paceline.train.training.task import Task, put_in_memory_format
from paceline.train.training.tensors import save_tensors, sha256_by_name, sha256_of
from paceline.train.workloads.build import build_model

# --- limit the memory of a rank, so that it fails instead of the machine -------------------------

_MIB = 2**20
# Texts of the errors of torch, oneDNN and the C++ library.
_ALLOCATION_FAILED = ("allocate memory", "bad_alloc", "out of memory", "could not create a memory")


@contextmanager
def limited_memory(mebibytes: int | None, rank: int) -> Iterator[None]:
    """Let larger allocations of private memory fail meanwhile.

    None: no limit. Raises EnvironmentLacks where an allocation fails for that reason.
    """
    if mebibytes is None:
        yield
        return
    try:
        with limited_private_memory(mebibytes * _MIB):
            yield
    except PacelineError:
        raise
    except Exception as error:
        if not _is_of_memory(error):
            raise
        traceback.print_exc()  # into the log of the rank
        raise EnvironmentLacks(
            f"rank {rank}: expected to need at most {mebibytes} MiB of private memory ([limits] "
            "rank_memory_mib), but needs more; use a smaller batch, or activation_checkpointing = "
            "true"
        ) from error


def _is_of_memory(error: Exception) -> bool:
    text = str(error)
    return isinstance(error, MemoryError) or any(part in text for part in _ALLOCATION_FAILED)


def train(trial: Trial, context: RankContext, files: TrialFiles) -> None:
    """Train the rank `context` of `trial`, and write the records to `files`.

    Collective over all ranks; every wait is limited by `trial.limits`. Raises PacelineErrors:
    EnvironmentLacks, DataError, TimedOut, RankFailed (PeerLost if another rank is the cause).
    """
    compiler.import_when_used()
    own = files.rank(context.rank)
    with (
        compiler_settings(trial.training),
        Spans(own.spans) as spans,
        recording(own.communication, own.operations) as recorder,
    ):
        spans.ended("imports", context.process_started_unix_s)
        set_threads(trial.placement.threads_per_worker)
        torch.set_float32_matmul_precision(trial.training.float32_matmul_precision)
        with spans("rendezvous"):
            peers = join_peers(context, trial)
        with peers.leaving():
            _TaskRank(trial, context, files, spans, peers, recorder, own).run()


@contextmanager
def _closing(strategy: LocalStrategy) -> Iterator[LocalStrategy]:
    """Close the strategy in any case; after an error, notify the peers that wait for this rank."""
    try:
        yield strategy
    except BaseException:
        strategy.close(failed=True)
        raise
    strategy.close(failed=False)


@dataclass(slots=True)
class _TaskRank:
    """The work of a rank between joining and leaving its peers."""

    trial: Trial
    context: RankContext
    files: TrialFiles
    spans: Spans
    peers: Peers
    recorder: Recorder
    own: RankFiles
    # of a trial that is compared with the baseline
    keeper: StateKeeper | None = None
    replay: StepReplay | None = None

    def run(self) -> None:
        with ExitStack() as opened:
            with limited_memory(self.trial.limits.rank_memory_mib, self.context.rank):
                with self.spans("data_load"):
                    share = self.peers.node("files")
                    found = open_samples(self.trial.training, self.files.root, share)
                    samples = opened.enter_context(found)
                    chosen = choose_checkpoint(self.trial, self.files, self.peers)
                    if chosen is not None:
                        samples = samples.since(chosen.steps)
                    feed = opened.enter_context(self._open_feed(samples))
                strategy = opened.enter_context(_closing(create_strategy(self.trial)))
                with self.spans("model_build"):
                    evaluator = self._evaluator(samples)
                    self._prepare(strategy, samples.task)
                    checkpoints = self._checkpoints(opened, strategy, samples, chosen)
                    if self.trial.is_replayed:
                        repeater = StepRepeater(
                            self.trial, self.context, self.files, samples, strategy, self.peers,
                            self._open_feed,
                        )  # fmt: skip
                        self.keeper, self.replay = begin_replay(repeater)
                self._continue(checkpoints)
                run_in_turns()
                with self.spans("train"):
                    steps = self._train(strategy, samples, feed, evaluator, checkpoints)
                write_json(self.own.memory, own_memory())
                feed.close()  # replays open others
                if own_dilation() > 1:
                    self.peers.of_all_ranks("trained", "")  # no rank is in its last step
                    run_together_again()
            with self.spans("bookkeeping"):
                self._finish(strategy, samples.task, steps)

    def _train(
        self,
        strategy: LocalStrategy,
        samples: Samples,
        feed: Feed,
        evaluator: Evaluator | None,
        checkpoints: Checkpoints | None,
    ) -> int:
        order = samples.order

        def between_steps(step: int, epoch: int) -> bool:
            took_time = self.keeper is not None and self.keeper.after_step(step + 1)
            if evaluator is None or not evaluator.is_due(step):
                return took_time
            with self.spans("evaluation"):
                evaluator.run(strategy, step, epoch, self.peers)
            return True

        def step_ended(row: StepRow) -> None:
            self._write_rows(strategy)
            if checkpoints is not None:
                checkpoints.step_ended(row)

        def updated(step: int) -> None:
            if checkpoints is not None:
                checkpoints.updated(step)

        loop = Loop(
            order=order,
            task=samples.task,
            strategy=strategy,
            rank=self.context.rank,
            counts_samples=self._stage == 0,
            on_first_gradient=lambda: self._save_gradient(strategy, order.first_step),
            on_update=updated,
            on_step_end=step_ended,
        )
        steps = order.first_step + loop.run(feed, self.own, between_steps)
        self._write_rows(strategy)  # a server applies updates of other ranks after its last step
        if steps != order.steps:
            raise RankFailed(
                f"rank {self.context.rank}: expected {order.steps} steps, the data set's reader "
                f"ended after {steps}",
                self.context.rank,
            )
        return steps

    def _write_rows(self, strategy: LocalStrategy) -> None:
        """Write what was recorded since the last step."""
        self.recorder.flush()
        updates = strategy.updates()
        if updates:
            with JsonlWriter(self.own.updates) as rows:
                rows.write_all(updates)

    @property
    def _stage(self) -> int:
        return self.context.local_rank % self.trial.placement.stages

    def _open_feed(self, samples: Samples, purpose: str = "samples") -> Feed:
        context, place = self.context, self.trial.placement
        shares_on_node = context.ranks_on_node // place.stages
        return samples.feed(
            self.trial,
            rank=context.node_index * shares_on_node + context.local_rank // place.stages,
            world_size=place.nodes * shares_on_node,
            with_inputs=self._stage == 0,
            share_of_node=self.peers.node(purpose),
        )

    def _evaluator(self, samples: Samples) -> Evaluator | None:
        """Return the evaluator of this rank's share of the samples that are held out."""
        trial, context = self.trial, self.context
        if trial.training.evaluation is None:
            return None
        return Evaluator(
            trial,
            samples.task,
            build_model(samples.task),
            samples.order,
            context,
            lambda: samples.held_out_feed(trial, context.rank, context.world_size),
            self.own.evaluations,
        )

    def _prepare(self, strategy: LocalStrategy, task: Task) -> None:
        """Build the model and set up the strategy, then write the actual environment."""
        trial = self.trial
        model = self._build_model(task)
        initial = sha256_of(model.state_dict())
        checkpoint_activations(task, model, trial)
        strategy.prepare(task, model, self.context, trial, self.peers)
        del model  # a strategy may keep only a part of it
        return_freed_memory()
        write_environment(
            self.context, trial, self.own, initial, self.peers.clock, strategy.workers()
        )

    def _build_model(self, task: Task) -> nn.Module:
        """Return the model with its first weights in their memory format; if no rank has room for
        it, in a file."""
        if not STRATEGIES.get(self.trial.local_strategy).holds_whole_model:
            # a copy in another format has no room either
            with FileMemory().for_new_tensors():
                return build_model(task)
        model = build_model(task)
        put_in_memory_format(model, self.trial.training.memory_format)
        return model

    def _checkpoints(
        self,
        opened: ExitStack,
        strategy: LocalStrategy,
        samples: Samples,
        chosen: Checkpoint | None,
    ) -> Checkpoints | None:
        """Return the checkpoints of this rank; None if the trial has none."""
        if self.trial.checkpoint is None:
            return None
        found = Checkpoints(
            self.trial, self.context, self.files, samples.order, strategy, self.peers, chosen
        )
        opened.callback(found.close)
        opened.enter_context(found.on_signal())
        return found

    def _continue(self, checkpoints: Checkpoints | None) -> None:
        """Restore the chosen checkpoint, and remove the records of steps that are repeated."""
        first_step = 0
        if checkpoints is not None and checkpoints.first_step:
            first_step = checkpoints.first_step
            with self.spans("restore"):
                checkpoints.restore()
        continue_rows(
            self.own,
            first_step,
            process_started_unix_s=self.context.process_started_unix_s,
            restored_unix_s=time.time(),
        )

    def _save_gradient(self, strategy: LocalStrategy, step: int) -> None:
        if step or not self.trial.save_tensors:
            return
        gradients = strategy.gradients()
        if self.context.is_first:
            save_tensors(self.files.gradient, gradients)

    def _finish(self, strategy: LocalStrategy, task: Task, steps: int) -> None:
        """Write what is compared: checksums of every rank, weights and result of the first one."""
        weights = strategy.state_dict()
        sums = [sha256_by_name(each) for each in (weights, *strategy.buffers_of_replicas())]
        unchanged = None if self.keeper is None else self.keeper.unchanged_after
        local = local_buffers(self.trial, task)
        sha256 = write_rank_weights(self.own, sums, local, unchanged)
        write_sources(self.trial.training, self.own)  # what the steps have imported
        if not self.context.is_first:
            self._replay()
            return
        end = End(
            steps=steps,
            weights_sha256=sha256,
            strategy=strategy.describe(),
            transport=self.peers.describe(),
        )
        initial = self._build_model(task)
        write_task_result(self.trial, self.files, end, task, weights, initial, self._replay)

    def _replay(self) -> Replayed:
        if self.replay is None:
            return Replayed()
        with self.spans("replay"):
            return self.replay.run()
