"""Linear layers of a replica whose gradients are computed from the factors of all ranks."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

from paceline.strategies.reduction.factor_choice import FactorChoice
from paceline.strategies.reduction.factor_exchange import ExchangedFactors
from paceline.strategies.reduction.factor_layers import FactorLayers

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from paceline.transports.bucket_settings import FactorSetting


class ReplicaFactors(ExchangedFactors):
    """The exchange and the products of one replica per rank, among all ranks.

    A step is `begin`, the passes, `finish`. Without a layer that sends factors it does nothing.
    """

    def __init__(self, setting: FactorSetting) -> None:
        super().__init__(FactorChoice(setting=setting))
        self._layers: FactorLayers | None = None
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
        self._choice, self._exchange = self._layers.join(setting, samples, dtype, limit_s)
        if self._exchange is not None:
            self._layers.capture(
                self._choice.chosen, partial(self._store, self._layers), self.keep_inputs
            )

    @property
    def parameter_names(self) -> list[str]:
        """Names of the parameters whose gradients are computed here."""
        return [] if self._layers is None else self._layers.parameter_names(self._choice.chosen)

    def finish(self) -> float:
        """Compute the gradients of the layers as their factors arrive. Return the seconds of the
        products."""
        spent_s = 0.0
        for name in reversed(self._choice.chosen):
            assert self._layers is not None, "join has created it for the chosen layers"
            factors = self.wait(name)
            started_s = time.perf_counter()
            for parameter, gradient in self._layers.gradients(name, *factors):
                parameter.grad = gradient
            spent_s += time.perf_counter() - started_s
        return spent_s

    def _store(self, layers: FactorLayers, layer: str, inputs: Tensor, gradients: Tensor) -> None:
        if layers.shapes[layer].has_indices:  # others have been kept in the forward pass
            self.keep_inputs(layer, inputs)
        self.keep_gradients(layer, gradients)
        self.ready_s = time.perf_counter()
