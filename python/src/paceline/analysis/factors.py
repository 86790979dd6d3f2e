"""The recorded choice between all-reduce and factor exchange of each linear layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline.analysis.reading import TrialRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTraffic:
    """Costs per step of both ways for one layer, by rank 0. None: the times were not predicted."""

    layer: str
    sends_factors: bool
    all_reduce_bytes: float
    all_reduce_s: float | None
    factor_bytes: float
    factor_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FactorTraffic:
    """The choice of one trial."""

    setting: str
    reason: str | None  # why no layer sends factors although its costs are lower
    speeds: Mapping[str, float] | None  # as measured before the training
    layers: tuple[LayerTraffic, ...]


def factor_traffic(record: TrialRecord) -> FactorTraffic | None:
    """Return the choice of a trial; None if it recorded none."""
    if record.result is None:
        return None
    found: dict[str, Any] | None = record.result.communication.get("sufficient_factors")
    if not found:
        return None
    return FactorTraffic(
        setting=found["setting"],
        reason=found["reason"],
        speeds=found["speeds"],
        layers=tuple(_layer(each) for each in found["layers"]),
    )


def _layer(values: Mapping[str, Any]) -> LayerTraffic:
    reduced, gathered = values["all_reduce"], values["factors"]
    return LayerTraffic(
        layer=values["layer"],
        sends_factors=values["sends_factors"],
        all_reduce_bytes=reduced["sent_bytes"],
        all_reduce_s=reduced["seconds"],
        factor_bytes=gathered["sent_bytes"],
        factor_s=gathered["seconds"],
    )
