"""One replica per rank: sequential, intraop, and processes connected by a transport.

With peers the replica is wrapped in torch's DistributedDataParallel, which reduces buckets while
the backward pass still runs (Li et al.: PyTorch Distributed, VLDB 2020). Linear layers may exchange
sufficient factors instead (see factor_exchange.py); DDP then ignores their parameters. They have an
optimiser of their own, which steps while the buckets are still summed.

A rank's loss is the sum over its samples divided by the number of samples of the *global* batch,
and gradients are summed over ranks. The result is the gradient of the global mean, whatever the
number of samples of each rank. (DDP's own mean over ranks would have to be undone, which costs one
more pass over all gradients.)
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from paceline.base.torch_internals import exclude_from_ddp
from paceline.collectives.pass_communication import PassCommunication
from paceline.measure.records.communication import StrategyResult
from paceline.plan.trials.trial import RankContext, Trial
from paceline.train.strategies.reduction.buckets import Buckets
from paceline.train.strategies.reduction.factor_choice import setting_of
from paceline.train.strategies.reduction.factor_exchange import ReplicaFactors
from paceline.train.strategies.reduction.node_shards import gradients_of
from paceline.train.strategies.reduction.shared_sums import synchronise_ranks
from paceline.train.training.compilation import compile_model
from paceline.train.training.devices import (
    InputMover,
    Stopwatch,
    device_of,
    move_model,
    on_cpu,
    synchronize,
    use_device,
)
from paceline.train.training.optimizers import (
    LOSS_SCALE,
    LossScale,
    TaskOptimizer,
    no_gradient,
    trained_parameters,
)
from paceline.train.training.passes import run_passes, working_dtype
from paceline.train.training.state import RankState, SavedState, restore_model, restore_optimizer
from paceline.train.training.strategy import (
    GradientResult,
    LocalStrategy,
    RankGroups,
    StepCommunication,
    TrainBatch,
)
from paceline.train.training.task import Task
from paceline.train.transports.bucket_settings import gradient_options_of
from paceline.train.transports.bucket_sums import create_sum

# Where the large gradients are not sent, smaller buckets begin earlier and keep the link busy.
_REST_BUCKET_MB = 2.0
_ONE_GRADIENT_MB = 2.0**-20  # of a bucket that one gradient fills


class DdpStrategy(LocalStrategy):
    """One model, wrapped in DistributedDataParallel if there are peers."""

    def __init__(self) -> None:
        self._buckets: Buckets | None = None
        self._optimizer: TaskOptimizer | None = None  # of gradients that are summed
        self._factors_optimizer: TaskOptimizer | None = None  # of gradients from factors
        self._ready_unix_s: float | None = None  # the gradients of the last batch, on this rank
        self._pass_communication: PassCommunication | None = None

    def prepare(
        self,
        task: Task,
        model: nn.Module,
        context: RankContext,
        trial: Trial,
        peers: RankGroups,  # noqa: ARG002  (DistributedDataParallel finds them itself)
    ) -> None:
        self._task, self._trial = task, trial
        self._is_first = context.is_first
        self._device = device_of(trial, context)
        self._device_settings = use_device(self._device, trial.training)
        self._mover, self._stopwatch = InputMover(self._device), Stopwatch(self._device)
        move_model(model, self._device)
        self._model = model
        self._parallel: nn.Module = self._model  # in DDP, if there are peers
        self._scale = LossScale.of(trial.training)
        if context.world_size == 1:
            self._create_optimizers(elsewhere=frozenset())
            compile_model(self._model, trial.training)
            return
        self._pass_communication = synchronise_ranks(model, trial)
        self._factors = factors = ReplicaFactors(setting_of(trial))
        if factors.choice.setting != "never":
            samples = trial.placement.samples_of_a_replica(trial.training.global_batch)
            dtype, limit_s = working_dtype(trial.training), trial.limits.collective_s
            factors.join(model, task.example_input(), samples, dtype, limit_s)
            factors.capture()
        self._create_optimizers(elsewhere=factors.parameter_names)
        compile_model(model, trial.training)
        self._wrap(model, elsewhere=factors.parameter_names)

    def _create_optimizers(self, elsewhere: frozenset[str]) -> None:
        """Create the optimisers. elsewhere: parameters whose gradients come from factors."""
        trained = trained_parameters(self._model).items()
        summed = [(name, p) for name, p in trained if name not in elsewhere]
        from_factors = [(name, p) for name, p in trained if name in elsewhere]
        self._optimizer = TaskOptimizer(self._task, summed, self._scale) if summed else None
        if from_factors:
            self._factors_optimizer = TaskOptimizer(self._task, from_factors, self._scale)

    @property
    def _optimizers(self) -> list[TaskOptimizer]:
        both = (self._factors_optimizer, self._optimizer)
        return [optimizer for optimizer in both if optimizer is not None]

    def _wrap(self, model: nn.Module, elsewhere: frozenset[str]) -> None:
        """Wrap the model in DDP. elsewhere: parameters whose gradients others compute."""
        trial, options = self._trial, gradient_options_of(self._trial)
        # those that are gathered during a wait are formed again in each step
        bucket_mb = options.bucket_mb if options.bucket_wait_ms is None else _ONE_GRADIENT_MB
        self._buckets = Buckets(self._stopwatch, create_sum(trial), defers=bool(elsewhere))
        if elsewhere:
            bucket_mb = min(bucket_mb, _REST_BUCKET_MB)
            exclude_from_ddp(model, list(elsewhere))
        if not trained_parameters(model).keys() - elsewhere:
            return  # DDP refuses a model without gradients of its own
        parallel = DistributedDataParallel(
            model,
            device_ids=None if self._device.type == "cpu" else [self._device.index],
            bucket_cap_mb=bucket_mb,
            forward_sync_buffers=False,
            gradient_as_bucket_view=True,
        )
        parallel.register_comm_hook(self._buckets, Buckets.sum)
        self._parallel = parallel

    def gradient(self, batch: TrainBatch) -> GradientResult:
        training, stopwatch = self._trial.training, self._stopwatch
        if self._buckets is not None:
            self._factors.begin(self._trial.placement.samples_of_a_replica(batch.global_samples))
        passed = run_passes(
            self._task,
            self._parallel,
            batch,
            training,
            stopwatch=stopwatch,
            mover=self._mover,
            accumulating=self._no_reduction,
            communication=self._pass_communication,
            scale=self._scale.value,
        )
        if self._buckets is None:
            return passed.result(alone=True)
        if batch.step == 0:
            self._require_gradients()
        ready_s = max(stopwatch.reached_s(self._buckets.ready), self._factors.ready_s)
        # The buckets are summed meanwhile.
        products_s = self._factors.finish()
        result = replace(passed, ready_s=ready_s).result(alone=False)
        assert result.comm_s is not None, "there are peers"
        self._ready_unix_s = result.comm_ready_unix_s
        return replace(
            result, backward_s=result.backward_s + products_s, comm_s=result.comm_s - products_s
        )

    def _require_gradients(self) -> None:
        """Raise UsageError if DDP waits in vain for the gradient of a parameter."""
        for name, parameter in trained_parameters(self._model).items():
            if parameter.grad is None and name not in self._factors.parameter_names:
                raise no_gradient(name)

    @contextmanager
    def _no_reduction(self) -> Iterator[None]:
        """Only accumulate gradients meanwhile."""
        with ExitStack() as stack:
            if isinstance(self._parallel, DistributedDataParallel):
                stack.enter_context(self._parallel.no_sync())
            if self._buckets is not None:
                stack.enter_context(self._factors.accumulating())
            yield

    def step(self) -> StepCommunication | None:
        """Step the optimisers: first that whose gradients are complete.

        The norm needs all gradients. Clipping needs it, and the scale of the loss under fp16.
        """
        squared_norm, waited_s = None, 0.0
        if self._task.clip_norm is not None or self._scale.is_used:
            waited_s = self._wait_for_buckets()
            squared_norm = sum(optimizer.squared_norm() for optimizer in self._optimizers)
        if self._factors_optimizer is not None:
            self._factors_optimizer.step(squared_norm)
        waited_s += self._wait_for_buckets()
        if self._optimizer is not None:
            self._optimizer.step(squared_norm)
        self._scale.update(squared_norm)
        synchronize(self._device)
        if self._factors_optimizer is None:
            return None
        return StepCommunication(comm_s=waited_s, comm_ready_unix_s=self._ready_unix_s)

    def _wait_for_buckets(self) -> float:
        """Wait for the sums that are under way; return the seconds."""
        if self._buckets is None:
            return 0.0
        began_s = time.perf_counter()
        self._buckets.wait()
        return time.perf_counter() - began_s

    def gradients(self) -> dict[str, Tensor]:
        self._wait_for_buckets()
        gradients = gradients_of(self._model.named_parameters())
        return on_cpu(self._scale.unscaled(gradients))

    def state_dict(self) -> dict[str, Tensor]:
        return on_cpu(self._model.state_dict())

    def rank_state(self) -> RankState:
        """Return everything on rank 0: all ranks have the same, except for running statistics of
        each replica."""
        state = RankState()
        if self._is_first:
            state.add_model(self._model)
            for optimizer in self._optimizers:
                state.add_optimizer(optimizer)
            state.values.update(self._scale.state)
        return state

    def restore(self, saved: SavedState) -> None:
        restore_model(self._model, saved)
        for optimizer in self._optimizers:
            restore_optimizer(optimizer, saved)
        self._scale.restore(saved.value(LOSS_SCALE))

    def describe(self) -> StrategyResult:
        settings: StrategyResult = {**self._device_settings, **self._scale.describe()}
        if self._buckets is None:
            return settings
        return {**settings, **self._factors.with_traffic(self._buckets.describe())}

    def close(self, *, failed: bool) -> None:
        """Close the gradient sum. The process group belongs to the transport."""
        if self._buckets is not None:
            self._buckets.gradient_sum.close(failed=failed)
