"""Exchange sufficient factors of linear layers between ranks, beside the backward pass.

Each rank sends the inputs of a layer in the forward pass, and the gradients of its outputs as soon
as the backward pass has computed them, to all ranks of a group. Then every rank has the factors of
all samples. Messages of all ranks have the same number of rows: a rank with fewer samples adds rows
of zeros, which add nothing to a product.

`ReplicaFactors` is the exchange of one replica per rank, which computes whole gradients.
`NodeFactors` is that of strategies whose workers share the weights of a node: a rank gathers the
factors of its workers over its replicate group, before the workers of the node compute their rows
from the factors of all of them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.base.errors import UsageError
from paceline.base.torch_internals import all_gather_single
from paceline.collectives.torch_internals import Work
from paceline.measure.records.communication import StrategyResult
from paceline.plan.costs import EmbeddingShape, FactorShape, all_gather_bytes
from paceline.plan.trials.trial import Trial
from paceline.train.strategies.reduction.factor_choice import (
    ChoiceContext,
    FactorChoice,
    choose,
    setting_of,
    shape_of,
)
from paceline.train.strategies.reduction.replicate_group import ReplicateGroup
from paceline.train.strategies.reduction.sufficient_factors import (
    FactorLayer,
    SufficientFactors,
    capture,
    embedding_gradient,
    embeddings,
    linear_layers,
    parameter_names,
)
from paceline.train.training.passes import working_dtype
from paceline.train.training.tensors import bias_gradient, joined, weight_gradient
from paceline.train.transports.bucket_settings import FactorSetting


def open_group(limit_s: float | None) -> dist.ProcessGroup | None:
    """Return a process group of all ranks for factors, so that they wait for no other message;
    collective.

    limit_s: limit of each wait; None means torch's default.
    """
    timeout = None if limit_s is None else timedelta(seconds=limit_s)
    group: dist.ProcessGroup | None = dist.new_group(timeout=timeout)
    return group


class FactorExchange:
    """Gathers the factors of some layers over the ranks of a group.

    It has no layers, and does nothing, until `choose` or `open`. Then a step is: `begin`; in the
    passes of each worker `keep_inputs` and `keep_gradients`; then `wait` for each layer. A worker
    is a replica of this rank. All ranks call every layer in the same order.
    """

    def __init__(self, setting: FactorSetting = "never") -> None:
        self.choice = FactorChoice(setting=setting)
        self._inputs: dict[str, _GatheredFactor] = {}
        self._gradients: dict[str, _GatheredFactor] = {}
        self._incomplete: set[int] = set()  # workers that have passes to come
        self._lock = threading.Lock()  # workers may be threads
        self._sent, self._ranks = 0, 1

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the layers that send factors."""
        return tuple(self._inputs)

    def choose(
        self,
        shapes: Mapping[str, FactorShape],
        context: ChoiceContext,
        only: Container[str] | None = None,
    ) -> None:
        """Choose the layers that send factors, and open their exchange; collective over all ranks.

        only: layers that this rank computes; None means all. Raises EnvironmentLacks if the ranks
        would compute different gradients.
        """
        self.choice = choose(shapes, context)
        chosen = {n: shapes[n] for n in self.choice.chosen if only is None or n in only}
        self.open(chosen, context.samples, context.dtype, context.gathering, context.workers)

    def open(
        self,
        shapes: Mapping[str, FactorShape],
        samples: int,
        dtype: torch.dtype,
        group: dist.ProcessGroup | None,
        workers: int = 1,
    ) -> None:
        """Exchange the factors of these layers.

        samples: maximum number of samples of this rank in a step, equal on all ranks.
        """
        self._ranks = dist.get_world_size(group)
        for name, shape in shapes.items():
            dtypes = (torch.int64, torch.float32) if shape.has_indices else (dtype, dtype)
            for factors, width, of_factor in (
                (self._inputs, shape.inputs, dtypes[0]),
                (self._gradients, shape.outputs, dtypes[1]),
            ):
                factors[name] = _GatheredFactor(
                    width, samples, shape.positions, self._ranks, of_factor, group, workers
                )

    def begin(self, samples: int) -> None:
        """Begin a step in which no rank has more than `samples` samples."""
        self._sent = 0
        for factor in (*self._inputs.values(), *self._gradients.values()):
            factor.begin(samples)

    @contextmanager
    def accumulating(self, worker: int = 0) -> Iterator[None]:
        """Send nothing meanwhile, because a later pass has more samples of the step."""
        self._incomplete.add(worker)
        try:
            yield
        finally:
            self._incomplete.discard(worker)

    def keep_inputs(self, layer: str, inputs: Tensor, worker: int = 0) -> bool:
        """Keep the inputs of a forward pass, shape (samples, inputs), and send those of the step
        after the last one. Return whether the layer sends factors."""
        return self._keep(self._inputs.get(layer), inputs, worker)

    def keep_gradients(self, layer: str, gradients: Tensor, worker: int = 0) -> bool:
        """Keep the gradients of the outputs, shape (samples, outputs), like `keep_inputs`."""
        return self._keep(self._gradients.get(layer), gradients, worker)

    def wait(self, layer: str) -> tuple[Tensor, Tensor]:
        """Return inputs and gradients of the outputs of all ranks, shapes (ranks x samples, …);
        blocks until they have arrived.

        They are valid until the next `begin`. Raises UsageError if a pass did not reach the layer.
        """
        for factor in (self._inputs[layer], self._gradients[layer]):
            if factor.work is None:
                raise UsageError(
                    f"layer {layer}: expected one forward and backward pass in every step, got "
                    'none; use sufficient_factors = "never"'
                )
        return self._inputs[layer].wait(), self._gradients[layer].wait()

    def with_traffic(self, others: StrategyResult) -> StrategyResult:
        """Add the choice and the traffic of factors to the description of other gradients."""
        sent = all_gather_bytes(self._sent, self._ranks) if self.layers else None
        return self.choice.with_traffic(others, sent)

    def _keep(self, factor: _GatheredFactor | None, part: Tensor, worker: int) -> bool:
        if factor is None:
            return False
        # The lock also keeps the order of messages equal on all ranks.
        with self._lock, torch.no_grad():
            is_last = worker not in self._incomplete
            self._sent += factor.keep(part.detach(), worker, is_last=is_last)
        return True


class _GatheredFactor:
    """One factor of one layer: the parts of this rank, and the rows of all ranks."""

    def __init__(
        self,
        features: int,
        samples: int,
        positions: int,
        ranks: int,
        dtype: torch.dtype,
        group: dist.ProcessGroup | None,
        workers: int,
    ) -> None:
        """samples: maximum number of samples of a rank. positions: rows of a sample."""
        self.work: Work | None = None
        self._group = group
        self._ranks = ranks
        self._positions = positions
        self._rows = samples * positions
        self._own = torch.empty(self._rows, features, dtype=dtype)
        self._all = torch.empty(ranks * self._rows, features, dtype=dtype)
        self._parts: list[list[Tensor]] = [[] for _ in range(workers)]
        self._complete: set[int] = set()

    def begin(self, samples: int) -> None:
        self.work = None
        self._rows = samples * self._positions
        self._complete.clear()
        for parts in self._parts:
            parts.clear()

    def keep(self, part: Tensor, worker: int, *, is_last: bool) -> int:
        """Keep a part; send all if it was the last one of all workers. Return the bytes sent."""
        if worker in self._complete:  # a layer may be computed again in the backward pass
            return 0
        self._parts[worker].append(part)
        if is_last:
            self._complete.add(worker)
        if len(self._complete) < len(self._parts):
            return 0
        return self._send()

    def _send(self) -> int:
        own = self._own[: self._rows]
        kept = joined([part for parts in self._parts for part in parts])
        if len(kept) > len(own):
            raise UsageError(
                f"sufficient factors: expected at most {len(own)} rows of a rank in a step "
                f"({self._positions} per sample), got {len(kept)}; state the largest number of "
                'samples, or use sufficient_factors = "never"'
            )
        own[: len(kept)].copy_(kept)
        own[len(kept) :].zero_()
        everyone = self._all[: self._ranks * self._rows]
        self.work = all_gather_single(everyone, own, group=self._group, async_op=True)
        return own.nbytes

    def wait(self) -> Tensor:
        assert self.work is not None, "the caller has checked it"
        self.work.wait()
        return self._all[: self._ranks * self._rows]


class ReplicaFactors(FactorExchange):
    """The exchange and the products of one replica per rank, among all ranks.

    A step is `begin`, the passes, `finish`. Without a layer that sends factors it does nothing.
    """

    def __init__(self, setting: FactorSetting) -> None:
        super().__init__(setting)
        self.parameter_names: frozenset[str] = frozenset()  # whose gradients are computed here
        self.ready_s = 0.0  # when the last factor of this rank was ready, time of perf_counter
        self._captured: dict[str, FactorLayer] = {}
        # Memory of the gradients of weights, by layer; reused if the weight has no gradient.
        self._memory: dict[str, Tensor] = {}

    def join(
        self,
        model: nn.Module,
        example: Tensor,
        samples: int,
        dtype: torch.dtype,
        limit_s: float | None,
    ) -> None:
        """Choose the layers of `model`; collective over all ranks.

        example: an input of one sample. samples: maximum number of samples of a rank in a step.
        dtype: of the factors. limit_s: limit of each wait; None means torch's default. Raises
        EnvironmentLacks if the ranks would compute different gradients.
        """
        modules: dict[str, nn.Module] = dict(model.named_modules())
        layers: dict[str, FactorLayer] = {**linear_layers(model, example)}
        shapes: dict[str, FactorShape] = {
            name: shape_of(layer) for name, layer in layers.items() if isinstance(layer, nn.Linear)
        }
        for name, count in embeddings(model, example).items():
            table = modules[name]
            assert isinstance(table, nn.Embedding), "embeddings() returns no other modules"
            layers[name] = table
            shapes[name] = EmbeddingShape(
                rows=table.num_embeddings, outputs=table.embedding_dim, positions=count
            )
        context = ChoiceContext(
            setting=self.choice.setting,
            samples=samples,
            dtype=dtype,
            gathering=open_group(limit_s) if shapes else None,
            reducing=None,
            ranks=dist.get_world_size(),
        )
        self.choose(shapes, context)
        self._captured = {name: layers[name] for name in self.layers}
        self.parameter_names = parameter_names(self._captured.items())

    def capture(self) -> None:
        """Let passes through the chosen layers keep their factors."""
        capture(self._captured, self._store, store_inputs=self.keep_inputs)

    def finish(self) -> float:
        """Compute the gradients of the layers as their factors arrive. Return the seconds of the
        products."""
        spent_s = 0.0
        for name in reversed(self.layers):
            factors = self.wait(name)
            started_s = time.perf_counter()
            for parameter, gradient in self._products(name, *factors):
                parameter.grad = gradient
            spent_s += time.perf_counter() - started_s
        return spent_s

    def _products(
        self, name: str, inputs: Tensor, outputs_gradients: Tensor
    ) -> list[tuple[Tensor, Tensor]]:
        """Return the parameters of a layer with their gradients, from the factors of all ranks."""
        layer, memory = self._captured[name], self._memory
        if name not in memory or layer.weight.grad is not None:
            memory[name] = torch.empty_like(layer.weight)
        if isinstance(layer, nn.Embedding):
            embedding_gradient(inputs, outputs_gradients, layer.padding_idx, memory[name])
            return [(layer.weight, memory[name])]
        weight_gradient(inputs, outputs_gradients, memory[name])
        found: list[tuple[Tensor, Tensor]] = [(layer.weight, memory[name])]
        bias: Tensor | None = layer.bias
        if bias is not None:
            of_bias = torch.empty_like(bias)
            bias_gradient(outputs_gradients, of_bias)
            found.append((bias, of_bias))
        return found

    def _store(self, layer: str, inputs: Tensor, gradients: Tensor) -> None:
        if isinstance(self._captured[layer], nn.Embedding):
            self.keep_inputs(layer, inputs)  # others have been kept in the forward pass
        self.keep_gradients(layer, gradients)
        self.ready_s = time.perf_counter()


class NodeFactors(FactorExchange):
    """The exchange of one rank over its replicate group. On a single node it does nothing."""

    def __init__(self, trial: Trial) -> None:
        super().__init__(setting_of(trial) if trial.placement.nodes > 1 else "never")
        self._training = trial.training
        self._owners = self._workers = 1
        self.parameter_names: frozenset[str] = frozenset()

    @property
    def may_send(self) -> bool:
        """Return whether the trial allows factors."""
        return self.choice.setting != "never"

    def join(
        self,
        layers: Mapping[str, nn.Linear],
        group: ReplicateGroup,
        *,
        owners: int,
        workers: int = 1,
        own: Container[str] | None = None,
    ) -> None:
        """Choose among the layers that have factors; collective over all ranks.

        owners: ranks of a node that divide the samples of a layer and the rows of its gradient.
        workers: replicas of this rank, in threads. own: names of the layers that this rank
        computes; None means all. Raises EnvironmentLacks if the nodes would compute different
        gradients.
        """
        if not self.may_send:
            return
        self._owners, self._workers = owners, workers
        self._ranks = dist.get_world_size(group.group)
        context = ChoiceContext(
            setting=self.choice.setting,
            samples=self._samples(self._training.global_batch),
            dtype=working_dtype(self._training),
            gathering=group.group,
            reducing=group.group,
            ranks=self._ranks,
            workers=workers,
        )
        self.choose({n: shape_of(layer, owners) for n, layer in layers.items()}, context, own)
        self.parameter_names = parameter_names((name, layers[name]) for name in self.layers)

    def rows(self, layer: str, samples: int) -> int:
        """Return how many rows the factors of a layer have if a replica has `samples` samples."""
        return samples * self._ranks if layer in self.layers else samples

    def begin(self, global_samples: int) -> None:
        """Begin a step of so many samples on all ranks."""
        super().begin(self._samples(global_samples))

    def gathered(self) -> SufficientFactors:
        """Return the factors of all nodes, after the passes of all workers; blocks until they have
        arrived."""
        return {layer: self.wait(layer) for layer in reversed(self.layers)}

    def _samples(self, global_samples: int) -> int:
        """Return the largest number of rows of a rank.

        A worker without a sample may pass one that does not count.
        """
        replicas = self._ranks * self._owners * self._workers
        return -(-global_samples // replicas) * self._workers
