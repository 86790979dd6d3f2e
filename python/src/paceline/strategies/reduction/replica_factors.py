"""Linear layers of a replica whose gradients are computed from the factors of all ranks."""

from __future__ import annotations

import time
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from paceline.strategies.reduction.factor_choice import FactorChoice
from paceline.strategies.reduction.factor_layers import FactorLayers

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from torch import Tensor, nn

    from paceline.strategies.reduction.factor_exchange import FactorExchange
    from paceline.transports.bucket_settings import FactorSetting


class ReplicaFactors:
    """The exchange and the products of one replica per rank, among all ranks.

    A step is `begin`, the passes, `finish`. Without a layer that sends factors it does nothing.
    """

    def __init__(self, setting: FactorSetting) -> None:
        self._choice = FactorChoice(setting=setting)
        self._layers: FactorLayers | None = None
        self._exchange: FactorExchange | None = None
        self._is_last_pass = True
        self.ready_s = 0.0  # when the last factor of this rank was ready, time of perf_counter

    def join(
        self,
        model: nn.Module,
        example: Tensor,
        samples: int,
        dtype: torch.dtype,
        limit_s: float,
    ) -> None:
        """Choose the layers of `model` and capture their factors; collective over all ranks.

        example: an input of one sample. samples: maximum number of samples of a rank in a step.
        dtype: of the factors. limit_s: limit of each wait. Raises EnvironmentLacks if the ranks
        would compute different gradients.
        """
        setting = self._choice.setting
        if setting == "never":
            return
        self._layers = FactorLayers(model, example)
        self._choice, exchange = self._layers.join(setting, samples, dtype, limit_s)
        self._exchange = exchange
        if exchange is None:
            return
        self._layers.capture(
            self._choice.chosen,
            partial(self._store, exchange),
            lambda layer, inputs: exchange.keep_inputs(layer, inputs, is_last=self._is_last_pass),
        )

    @property
    def parameter_names(self) -> list[str]:
        """Names of the parameters whose gradients are computed here."""
        return [] if self._layers is None else self._layers.parameter_names(self._choice.chosen)

    def begin(self, samples: int) -> None:
        """Begin a step in which no rank has more than `samples` samples."""
        if self._exchange is not None:
            self._exchange.begin(samples)

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Send nothing meanwhile, because a later pass has more samples of the step."""
        self._is_last_pass = False
        yield
        self._is_last_pass = True

    def finish(self) -> float:
        """Compute the gradients of the layers as their factors arrive. Return the seconds of the
        products."""
        spent_s = 0.0
        for name in reversed(self._choice.chosen):
            assert self._exchange is not None, "join has created it for the chosen layers"
            assert self._layers is not None, "as above"
            factors = self._exchange.wait(name)
            started_s = time.perf_counter()
            for parameter, gradient in self._layers.gradients(name, *factors):
                parameter.grad = gradient
            spent_s += time.perf_counter() - started_s
        return spent_s

    def with_traffic(self, others: dict[str, Any]) -> dict[str, Any]:
        """Add the choice and the traffic of factors to the description of other gradients."""
        sent = None if self._exchange is None else self._exchange.sent_bytes
        return self._choice.with_traffic(others, sent)

    def _store(
        self, exchange: FactorExchange, layer: str, inputs: Tensor, gradients: Tensor
    ) -> None:
        assert self._layers is not None, "join has created it"
        if self._layers.shapes[layer].has_indices:  # others have been kept in the forward pass
            exchange.keep_inputs(layer, inputs, is_last=self._is_last_pass)
        exchange.keep_gradients(layer, gradients, is_last=self._is_last_pass)
        self.ready_s = time.perf_counter()
