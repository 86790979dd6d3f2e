"""One rank of a trial whose task is a script of the user, from rendezvous to result.

The launcher's job side calls `train` here in place of `paceline.train.rank.train`.
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from torch.optim import Optimizer

from paceline.base.errors import StepsDiffer, UsageError
from paceline.base.torch_internals.compiler import import_now
from paceline.collectives.recorder import Recorder
from paceline.measure.records.documents import continue_rows
from paceline.measure.records.layout import TrialFiles
from paceline.measure.records.sources import write_sources
from paceline.measure.records.virtual_clock import run_in_turns
from paceline.plan.trials.trial import RankContext, Trial
from paceline.train.rank.loop import (
    End,
    write_environment,
    write_rank_weights,
    write_script_result,
)
from paceline.train.rank.peers import Peers, join_peers
from paceline.train.rank.script.alterations import Start, altering
from paceline.train.rank.script.modules import (
    CalledModules,
    OwnUpdates,
    flat_parameters,
    parameter_names,
)
from paceline.train.rank.script.observer import Observer
from paceline.train.rank.script.own_steps import OwnStepsRecorder
from paceline.train.rank.script.process_group import ProcessGroups, other_library
from paceline.train.rank.script.program import (
    EnoughSteps,
    failure_of,
    run_script,
    torchrun_variables,
)
from paceline.train.rank.script.reached_rows import ReachedRowsRecorder
from paceline.train.rank.script.recorder import TrainingRecorder
from paceline.train.rank.script.resume_state import ResumeRecorder
from paceline.train.rank.script.spawned import SpawnedProcesses
from paceline.train.rank.script.tensors import Checksums, ParameterRecord
from paceline.train.rank.script.touched_files import TouchedFiles
from paceline.train.rank.spans import Spans, UnansweredOperations, recording
from paceline.train.training.resources import set_threads

# The first optimiser imports it anyway, which takes a second or more; here it counts as import time
# under every launcher.
import_now()


def train(trial: Trial, context: RankContext, files: TrialFiles) -> None:
    """Run the trial's script as the rank `context`, and write the records to `files`.

    Raises PacelineErrors: UsageError if the script does not train as expected, RankFailed with file
    and line if it fails (PeerLost if another rank is the cause), EnvironmentLacks, TimedOut.
    """
    assert trial.training.script is not None
    own = files.rank(context.rank)
    # A script counts its steps from zero, whatever it restores by itself.
    continue_rows(
        own, 0, process_started_unix_s=context.process_started_unix_s, restored_unix_s=time.time()
    )
    with Spans(own.spans) as spans, recording(own.communication, own.operations) as operations:
        spans.ended("imports", context.process_started_unix_s)
        set_threads(trial.placement.threads_per_worker)
        with spans("rendezvous"):
            peers = join_peers(context, trial, open_transport=False)
        run_in_turns()  # where the script begins its first step is not known
        with peers.leaving(partial(failure_of, trial.training.script)):
            _ScriptRank(trial, context, files, spans, peers, operations).run()


class _ScriptRank:
    """The work of a rank between joining and leaving its peers."""

    def __init__(
        self,
        trial: Trial,
        context: RankContext,
        files: TrialFiles,
        spans: Spans,
        peers: Peers,
        operations: Recorder,
    ) -> None:
        assert trial.training.script is not None
        self._trial = trial
        self._script = trial.training.script
        self._context = context
        self._files = files
        self._spans = spans
        self._peers = peers
        self._groups = ProcessGroups(trial, context, peers)
        self._training = TrainingRecorder(
            trial.training,
            context,
            files.rank(context.rank),
            operations,
            self._first_step,
            ends=self._script.observe is None,
        )
        self._touched = TouchedFiles(files, files.rank(context.rank), Path(self._script.directory))
        self._unanswered = UnansweredOperations(files, context.rank, context.world_size)
        self._processes = SpawnedProcesses(self._script, context)
        self._modules = CalledModules()
        self._updates = OwnUpdates(self._modules, self._refuse_updates)
        self._parameters: ParameterRecord | None = None
        self._observer: Observer | None = None
        self._own_steps: OwnStepsRecorder | None = None
        self._rows: ReachedRowsRecorder | None = None
        observe = self._script.observe
        if observe is not None:
            own = files.rank(context.rank)
            checksums = Checksums()
            self._observer = Observer(observe, context, files, own, operations, checksums)
            self._rows = ReachedRowsRecorder(observe, files, context.rank)
            if context.world_size > 1:
                self._own_steps = OwnStepsRecorder(
                    observe, own, context.world_size, self._rows, operations, checksums
                )

    def run(self) -> None:
        os.environ.update(torchrun_variables(self._trial, self._context))
        started_unix_s = time.time()
        try:
            with ExitStack() as stack:
                if self._script.resume is not None:
                    own = self._files.rank(self._context.rank)
                    stack.enter_context(ResumeRecorder(self._script.resume, own).recording())
                if self._observer is not None:  # it sees each step before the last one ends all
                    stack.enter_context(self._observer.observing())
                if self._own_steps is not None:
                    stack.enter_context(self._own_steps.observing())
                if self._rows is not None:  # it ends the script
                    stack.enter_context(self._rows.noting())
                stack.enter_context(self._modules.noting())
                stack.enter_context(self._updates.noticing())
                stack.enter_context(self._groups.answering())
                stack.enter_context(self._training.recording())
                stack.enter_context(self._processes.answering())
                if self._script.resume is None:
                    stack.enter_context(self._touched.noticing())
                if self._script.altered is not None:
                    stack.enter_context(altering(self._script.altered, self._start()))
                has_ended = run_script(self._script, self._trial.arguments) and self._end_children()
                if has_ended:
                    self._peers.while_leaving = self._check_others
                if self._rows is not None:
                    self._rows.has_ended = has_ended
        finally:
            self._training.record_spans(self._spans, started_unix_s)
        with self._spans("bookkeeping"):
            self._finish()

    def _end_children(self) -> bool:
        """Answer processes that the script has left; return whether it ended by itself."""
        try:
            if self._parameters is None:
                self._processes.finish()
        except EnoughSteps:
            return False
        return True

    def _start(self) -> Start | None:
        """Return what makes this training start as its reference; None: it starts by itself."""
        altered, observe = self._script.altered, self._script.observe
        if altered is None or observe is None or not altered.same_start:
            return None
        root = self._files.root
        reference = TrialFiles(root.parent / (observe.reference or root.name))
        return Start(
            reference.weights_at("start"),
            is_reference=observe.reference is None,
            writes=self._context.is_first,
        )

    def _first_step(self, optimizer: Optimizer) -> None:
        """Check and record what is known when the first gradient is complete."""
        self._check_group()
        self._touched.check(self._script.path)
        self._modules.stop()
        self._updates.stop()
        models = self._modules.models()
        names = parameter_names(models)
        keeps = self._trial.save_tensors and self._context.is_first
        self._parameters = ParameterRecord(
            optimizer, names, self._files if keeps else None, flat_parameters(models)
        )
        self._groups.before_destroy = self._parameters.keep_sharded
        write_environment(
            self._context,
            self._trial,
            self._files.rank(self._context.rank),
            self._parameters.initial_sha256,
            self._peers.clock,
            first_batch_sha256=self._training.first_batch_sha256,
        )

    def _check_others(self) -> None:
        """Raise StepsDiffer if another rank waits for this one, whose script has ended."""
        found = self._unanswered.find()
        if found is not None:
            rank, operation = found
            raise StepsDiffer(
                f"script {self._script.path}: rank {self._context.rank} has ended after "
                f"{self._training.steps} steps, but rank {rank} waits for it in "
                f"{operation.operation} ({operation.sequence}); expected equal numbers of steps on "
                "all ranks: give each rank the same number of batches",
                self._context.rank,
            )

    def _refuse_updates(self) -> None:
        raise UsageError(
            f"script {self._script.path}: expected steps of an optimiser of torch.optim on each "
            f"rank, but the weights of rank {self._context.rank} change without one, by hand or as "
            "another rank sends them, so nothing tells where its steps end; let an optimiser on "
            "each rank make the updates, such as torch.optim.SGD"
        )

    def _check_group(self) -> None:
        """Raise UsageError if several ranks train without a process group."""
        ranks = self._context.world_size
        if ranks > 1 and not self._groups.opened:
            other = other_library()
            if other is not None:
                raise UsageError(
                    f"script {self._script.path}: expected it to exchange gradients through "
                    f"torch.distributed, but it never calls init_process_group, and has {other}; "
                    "what that exchanges is not recorded, so its ranks cannot be compared"
                )
            raise UsageError(
                f"script {self._script.path}: expected it to call "
                f"torch.distributed.init_process_group, because the trial has {ranks} ranks; it "
                "trains alone on each of them. Call it where WORLD_SIZE is above 1, or use "
                "local_strategy sequential or intraop"
            )

    def _finish(self) -> None:
        """Write the result, after the script has ended well."""
        if self._parameters is None:
            self._touched.check(self._script.path)
            raise UsageError(
                f"script {self._script.path}: expected a training, but it ended without a step of "
                "an optimiser of torch.optim; check its arguments"
            )
        sums, moved = self._parameters.final()
        own = self._files.rank(self._context.rank)
        sha256 = write_rank_weights(own, [sums])
        write_sources(self._trial.training, own)  # what the steps have imported
        if not self._context.is_first:
            return
        end = End(
            steps=self._training.steps, weights_sha256=sha256, transport=self._peers.describe()
        )
        write_script_result(
            self._trial,
            self._files,
            end,
            parameters=self._parameters.count,
            moved=moved,
            not_compared=self._parameters.not_compared,
        )
