"""Exchange sufficient factors of linear layers between ranks, beside the backward pass.

Each rank sends the inputs of a layer in the forward pass, and the gradients of its outputs as soon
as the backward pass has computed them, to all ranks of a group. Then every rank has the factors of
all samples. Messages of all ranks have the same number of rows: a rank with fewer samples adds rows
of zeros, which add nothing to a product.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.costs.link_cost import all_gather_bytes
from paceline.errors import UsageError
from paceline.strategies.reduction.factor_choice import FactorChoice, choose
from paceline.training.linear import joined

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Mapping

    from paceline.costs.factor_cost import FactorShape
    from paceline.records.communication import StrategyResult
    from paceline.strategies.reduction.factor_choice import ChoiceContext
    from paceline.torch_internals import Work
    from paceline.transports.bucket_settings import FactorSetting


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
        self.work = dist.all_gather_single(everyone, own, group=self._group, async_op=True)
        return own.numel() * own.element_size()

    def wait(self) -> Tensor:
        assert self.work is not None, "the caller has checked it"
        self.work.wait()
        return self._all[: self._ranks * self._rows]
