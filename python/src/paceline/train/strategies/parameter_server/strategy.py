"""A worker and a server on each rank (`parameter-server`).

The weights of the whole model are divided into as many shards as there are ranks. Each rank serves
one of them, in a thread beside its training, and trains a replica of the model:

    each worker: forward and backward pass of its own samples
    after every `push_period_steps`: it sends the gradients since the last push to all servers
    each server: applies what it gets with the task's optimiser; see server.py
    after every `fetch_period_steps`: the worker gets the weights of all shards

Between two fetches a worker updates its copy of the weights with its own gradients.

- synchronous: servers wait for all workers; equivalent to averaging gradients.
- asynchronous: nobody waits. Downpour SGD (Dean et al.: Large Scale Distributed Deep Networks, NIPS
  2012, section 4.1).
- stale-synchronous: a worker waits while it is more than `staleness_bound_steps` steps ahead of the
  slowest one (Ho et al.: More Effective Distributed ML via a Stale Synchronous Parallel Parameter
  Server, NIPS 2013).
- shat: as asynchronous, but a worker mixes the weights of the server into its own ones instead of
  replacing them (after Ko and Kim: SHAT, Applied Sciences 12(1), 2022). Its own model counts as one
  of the d + 1 updates since its last fetch: w = w / (d + 1) + server x d / (d + 1), where d is the
  number of updates of others. So d grows with the number of workers and with the worker's delay.

An update of a part of the batch has a part of the learning rate (TaskOptimizer.step_part).
"""

from __future__ import annotations

import time
from dataclasses import replace

import torch
from torch import Tensor, nn

from paceline.collectives.recorder import begin_operation
from paceline.measure.records.communication import StrategyResult
from paceline.measure.records.rows import UpdateRow
from paceline.plan.costs import all_reduce_bytes
from paceline.plan.trials.trial import RankContext, Trial
from paceline.train.strategies.parameter_server.descriptor import ParameterServerOptions
from paceline.train.strategies.parameter_server.messages import (
    Messages,
    RequestHeader,
    Server,
    ServerShard,
    open_group,
    place_of,
)
from paceline.train.strategies.reduction.flat_layout import FlatReplica
from paceline.train.strategies.reduction.replicate_group import all_reduce_tensors
from paceline.train.training.optimizers import TaskOptimizer
from paceline.train.training.passes import run_passes
from paceline.train.training.state import RankState, SavedState, persistent_buffers, restore_model
from paceline.train.training.strategy import (
    GradientResult,
    LocalStrategy,
    RankGroups,
    StepCommunication,
    TrainBatch,
)
from paceline.train.training.task import Task


class ServerClient:
    """Sends the requests of one worker. The server of its own rank gets them without messages."""

    def __init__(self, rank: int, places: list[slice], server: Server, messages: Messages) -> None:
        """places: of the shards in the flat weights, by server. server: that of this rank.
        messages: of the worker alone."""
        self.places = places
        self.has_left = False
        self._rank, self._server, self.messages = rank, server, messages
        self._others = [other for other in range(len(places)) if other != rank]
        self._versions = [0] * len(places)  # of the last fetch, by server
        self._pushed = self._pushed_before_fetch = 0
        self._rows: list[UpdateRow] = []

    def send(self, request: RequestHeader, gradient: Tensor | None = None) -> None:
        """Send a request to every server, with the numbers of this worker filled in.

        gradient: of the whole model, flat, if it pushes; it must not change until all is sent.
        """
        for server in [*self._others, self._rank]:
            own = replace(request, pushed=self._pushed, version=self._versions[server])
            part = None if gradient is None else gradient[self.places[server]]
            if server == self._rank:
                self._server.request(own, part)
            else:
                self.messages.request(server, own, part)
        if request.pushes:
            self._rows.append(
                UpdateRow(
                    event="pushed",
                    worker=self._rank,
                    sequence=self._pushed,
                    step=request.clock - 1,
                    shards=len(self.places),
                )
            )
            self._pushed += 1

    def receive(self, into: Tensor, needed_clock: int, *, trains: bool = True) -> list[int]:
        """Get the fetched weights of all shards. trains: whether the worker continues with them.

        Return how many updates of other workers each shard has got since the last fetch. The own
        server comes first: there, the limit of a wait for slow workers knows their progress.
        """
        versions = list(self._versions)
        own = into[self.places[self._rank]]
        versions[self._rank] = self._server.fetch(needed_clock, own)
        for server in self._others:
            versions[server] = self.messages.receive_weights(server, into[self.places[server]])
        own_updates = self._pushed - self._pushed_before_fetch
        pairs = zip(versions, self._versions, strict=True)
        missed = [now - before - own_updates for now, before in pairs]
        if trains:
            self._versions, self._pushed_before_fetch = versions, self._pushed
        return missed

    def leave(self, clock: int) -> None:
        """Notify the servers that no request will follow."""
        for server in self._others:
            leaving = RequestHeader(leaves=True, clock=clock, pushed=self._pushed)
            self.messages.request(server, leaving, None)
        self.messages.finish()
        self.has_left = True

    def continue_after(self, pushed: int) -> None:
        """Number the next update `pushed`; the servers begin again with version 0."""
        self._pushed = self._pushed_before_fetch = pushed

    def take_rows(self) -> list[UpdateRow]:
        """Return the rows of the pushes since the last call."""
        rows, self._rows = self._rows, []
        return rows


class ParameterServerStrategy(LocalStrategy):
    """One worker and one server."""

    pauses_for_checkpoints = True

    def __init__(self) -> None:
        self._server: Server | None = None
        self._local: TaskOptimizer | None = None  # between two fetches
        self._share = 0.0  # of the accrued gradients
        self._steps = 0  # finished
        self._restored_steps = 0

    def prepare(
        self,
        task: Task,
        model: nn.Module,
        context: RankContext,
        trial: Trial,
        peers: RankGroups,  # noqa: ARG002  (torch's default group has all ranks)
    ) -> None:
        """Divide the weights among the servers; collective over all ranks."""
        self._task, self._trial = task, trial
        self._options = options = trial.options_as(ParameterServerOptions)
        rank, self._ranks = context.rank, context.world_size
        self._rank = rank
        self._name = f"worker {rank}"
        self._replica = replica = FlatReplica(model)
        self._accrued = torch.zeros_like(replica.weights)  # gradients since the last push
        shards = replica.layout.shards(self._ranks)
        if options.has_local_optimizer:
            self._local = TaskOptimizer(task, replica.parameters.items())
        shard = ServerShard(
            replica.layout,
            shards[rank],
            replica.weights,
            task,
            rank=rank,
            workers=self._ranks,
            options=options,
        )
        group, limit_s = open_group(trial), trial.limits.collective_s
        self._server = Server(
            shard, Messages(group, limit_s), rank=rank, ranks=self._ranks, limit_s=limit_s
        )
        places = [place_of(each) for each in shards]
        self._client = ServerClient(rank, places, self._server, Messages(group, limit_s))

    def gradient(self, batch: TrainBatch) -> GradientResult:
        """Compute the gradient of this worker's samples, as a part of the mean over the batch."""
        self._batch = batch
        passed = run_passes(self._task, self._replica.model, batch, self._trial.training)
        self._replica.require_gradients()
        accrued = self._replica.named(self._accrued)
        for name, gradient in self._replica.gradients().items():
            accrued[name].add_(gradient)
        self._share += len(batch.sample_ids) / batch.global_samples
        return replace(passed.result(alone=True), comm_s=0.0)

    def step(self) -> StepCommunication:
        """Update the own copy of the weights, push and fetch if they are due."""
        if self._local is not None:  # the own copy is not replaced after every step
            share = len(self._batch.sample_ids) / self._batch.global_samples
            self._replica.step_part(self._local, share)
        started_s, ready_unix_s = time.perf_counter(), time.time()
        self._steps += 1
        options, is_last = self._options, self._batch.is_last
        pushes = is_last or self._is_push_due
        fetches = is_last or self._steps % options.fetch_period_steps == 0
        if pushes or fetches:
            self._exchange(pushes=pushes, fetches=fetches, needed_clock=self._needed_clock())
        if is_last:
            self._client.leave(self._steps)
        waits = options.update_mode == "synchronous"
        return StepCommunication(
            comm_s=time.perf_counter() - started_s,
            comm_ready_unix_s=ready_unix_s if waits else None,
        )

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients of this step, summed over all workers; collective.

        In the first step this is the gradient of the batch in every mode, because all workers
        still have the initial weights.
        """
        own = {name: gradient.clone() for name, gradient in self._replica.gradients().items()}
        all_reduce_tensors(list(own.values()))
        return own

    def state_dict(self) -> dict[str, Tensor]:
        """Return this worker's weights; after the last step those of the servers."""
        return self._replica.state_dict()

    def weights_to_evaluate(self) -> dict[str, Tensor]:
        """Return the servers' weights when all workers have finished this step; collective."""
        if self._client.has_left:
            return self.state_dict()
        weights = torch.zeros_like(self._replica.weights)
        fetch = RequestHeader(fetches=True, clock=self._steps, needed_clock=self._steps)
        self._client.send(fetch)
        self._client.receive(weights, fetch.needed_clock, trains=False)
        return self._replica.state_dict(weights)

    def steps_ahead(self) -> int:
        if self._server is None:
            return 0
        with self._server.locked() as shard:
            return max(shard.clocks) - shard.clocks[self._rank]

    def settle(self) -> None:
        """Push what is not pushed yet, and continue with the servers' weights when all workers have
        finished this step."""
        self._exchange(pushes=not self._is_push_due, fetches=True, needed_clock=self._steps)

    def rank_state(self) -> RankState:
        """Return the shard of this rank's server.

        A worker's own weights and optimiser between two fetches are not part of the state.
        """
        assert self._server is not None, "prepare comes first"
        state = RankState()
        with self._server.locked() as shard:
            shard.add_to(state)
        if self._rank == 0:
            state.add_buffers(persistent_buffers(self._replica.model))
        return state

    def restore(self, saved: SavedState) -> None:
        assert self._server is not None, "prepare comes first"
        restore_model(self._replica.model, saved)
        with self._server.locked() as shard:
            self._client.continue_after(shard.restore(saved)[self._rank])
        if self._local is not None:
            self._local.repeat_schedule(saved.steps)
        self._steps = self._restored_steps = saved.steps
        all_reduce_tensors([torch.zeros(1)])  # no worker sends requests before all have restored

    def updates(self) -> list[UpdateRow]:
        rows = self._client.take_rows()
        if self._server is not None:
            with self._server.locked() as shard:
                rows += shard.take_rows()
        return rows

    def describe(self) -> StrategyResult:
        """Return settings and traffic. Bytes are means over all steps; uncompressed bytes are those
        of averaging gradients in every step."""
        sizes = [4 * (place.stop - place.start) for place in self._client.places]
        described: StrategyResult = {"update_mode": self._options.update_mode, "shard_bytes": sizes}
        steps = self._steps - self._restored_steps
        if self._server is None or not steps:
            return described
        sent = self._client.messages.sent_bytes + self._server.messages.sent_bytes
        return {
            **described,
            "sent_bytes_per_step": round(sent / steps),
            "uncompressed_bytes_per_step": round(all_reduce_bytes(sum(sizes), self._ranks)),
        }

    def close(self, *, failed: bool) -> None:
        """End the server; without a failure, when all other workers have left."""
        server, self._server = self._server, None
        if server is not None:
            server.close(failed=failed)

    @property
    def _is_push_due(self) -> bool:
        """Return whether the regular pushes include the gradient of the last step."""
        return self._steps % self._options.push_period_steps == 0

    def _exchange(self, *, pushes: bool, fetches: bool, needed_clock: int) -> None:
        """Push the accrued gradients, fetch the weights, or both.

        needed_clock: steps that all workers must have finished before this one continues. In the
        records it is one operation of this rank alone: others are not at the same one.
        """
        payload_bytes = 4 * self._replica.layout.elements * (pushes + fetches)
        operation = begin_operation(self._name, 1, "exchange", payload_bytes)
        request = RequestHeader(
            pushes=pushes,
            fetches=fetches,
            clock=self._steps,
            needed_clock=needed_clock,
            share=self._share,
        )
        self._client.send(request, self._accrued if pushes else None)
        if fetches:
            # Where all workers are at the same step, the servers' weights contain all updates.
            is_mixed = self._options.update_mode == "shat" and needed_clock < self._steps
            weights = self._replica.weights
            target = torch.empty_like(weights) if is_mixed else weights
            missed = self._client.receive(target, request.needed_clock)
            if is_mixed:
                self._mix(target, missed)
        self._client.messages.finish()
        operation.end()
        if pushes:
            self._accrued.zero_()
            self._share = 0.0

    def _needed_clock(self) -> int:
        """Return the number of steps that all workers must have finished before this one goes on.

        Every worker waits for the last step, so that all end with the same weights.
        """
        if self._batch.is_last or self._options.update_mode == "synchronous":
            return self._steps
        bound = self._options.staleness_bound_steps
        return 0 if bound is None else max(0, self._steps - bound)

    def _mix(self, fetched: Tensor, missed: list[int]) -> None:
        """Move the own weights towards the fetched ones: the farther, the more updates it missed.

        missed: updates of other workers since the last fetch, by server.
        """
        for place, others in zip(self._client.places, missed, strict=True):
            self._replica.weights[place].lerp_(fetched[place], others / (others + 1))
