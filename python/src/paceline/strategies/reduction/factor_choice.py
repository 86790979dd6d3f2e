"""Choose for each linear layer how its gradient crosses the network, the same on all ranks."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from paceline.costs.factor_cost import Cost, LinearShape, all_reduce_cost, factor_cost
from paceline.errors import EnvironmentLacks
from paceline.spec.extensions import TRANSPORTS
from paceline.strategies.reduction.calibration import measure
from paceline.transports.bucket_settings import gradient_options_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    import torch.distributed as dist
    from torch import nn

    from paceline.costs.factor_cost import FactorShape, Speeds
    from paceline.plan.trial import Trial
    from paceline.records.communication import FactorResult, StrategyResult
    from paceline.transports.bucket_settings import FactorSetting

# Its product is measured where only embeddings have factors.
_ANY_SHAPE = LinearShape(inputs=1024, outputs=1024)
_DIFFERENT_BITS = "products of equal factors differ between the ranks' processors"


def setting_of(trial: Trial) -> FactorSetting:
    """Return the setting that a trial's training uses.

    "auto" means "never" within a node, on GPUs, with gradient compression, which is compared with
    all gradients, and where the transport has only one process group.
    """
    options = gradient_options_of(trial)
    may_send = (
        trial.placement.nodes > 1
        and trial.device == "cpu"
        and options.compression is None
        and not TRANSPORTS.get(trial.transport).joins_flat_only
    )
    if options.sufficient_factors == "auto" and not may_send:
        return "never"
    return options.sufficient_factors


def shape_of(layer: nn.Linear, owners: int = 1) -> LinearShape:
    """Return the shape for the cost model. owners: ranks of a node that divide the rows."""
    return LinearShape(
        inputs=layer.in_features,
        outputs=layer.out_features,
        has_bias=layer.bias is not None,
        owners=owners,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerChoice:
    """The two costs of one layer, and the choice."""

    layer: str
    all_reduce: Cost
    factors: Cost
    sends_factors: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class FactorChoice:
    """The choices of all linear layers that have sufficient factors."""

    setting: FactorSetting
    layers: tuple[LayerChoice, ...] = ()
    speeds: Speeds | None = None  # None: not measured, because no layer depends on them
    reason: str | None = None  # why no layer sends factors although its costs are lower

    @property
    def chosen(self) -> tuple[str, ...]:
        """Names of the layers that send factors."""
        return tuple(each.layer for each in self.layers if each.sends_factors)

    def describe(self) -> FactorResult:
        """Return the choice for the records; empty without a linear layer."""
        if not self.layers:
            return {}
        return {
            "setting": self.setting,
            "speeds": None if self.speeds is None else asdict(self.speeds),
            "reason": self.reason,
            "layers": [asdict(each) for each in self.layers],
        }

    def with_traffic(self, others: StrategyResult, sent_bytes: float | None) -> StrategyResult:
        """Add the choice and the traffic of factors to the description of other gradients.

        sent_bytes: by this rank in the last step; None if no layer sends factors.
        """
        described = self.describe()
        if sent_bytes is None:
            return {**others, "sufficient_factors": described} if described else others
        uncompressed = sum(each.all_reduce.sent_bytes for each in self.layers if each.sends_factors)
        return {
            **others,
            "sent_bytes_per_step": round(others.get("sent_bytes_per_step", 0) + sent_bytes),
            "uncompressed_bytes_per_step": round(
                others.get("uncompressed_bytes_per_step", 0) + uncompressed
            ),
            "sufficient_factors": described,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceContext:
    """Conditions that are equal for all layers of a trial."""

    setting: FactorSetting
    samples: int  # of one rank, at most
    dtype: torch.dtype  # of the factors
    gathering: dist.ProcessGroup | None  # gathers factors
    reducing: dist.ProcessGroup | None  # sums gradients
    ranks: int  # of each of both groups
    workers: int = 1  # threads of a rank that divide a product


def choose(shapes: Mapping[str, FactorShape], context: ChoiceContext) -> FactorChoice:
    """Choose for every layer; collective over all ranks.

    Speeds are measured only if factors would save bytes. Raises EnvironmentLacks if factors must be
    used but processors would compute different gradients from them.
    """
    setting = context.setting
    by_bytes = _choices(shapes, context, None)
    may_send = setting == "always" or (setting == "auto" and any(map(_saves_bytes, by_bytes)))
    if not shapes or not may_send:
        return FactorChoice(setting=setting, layers=by_bytes)
    linear = [shape for shape in shapes.values() if isinstance(shape, LinearShape)]
    largest = max(linear, key=lambda shape: shape.gradient_bytes, default=_ANY_SHAPE)
    rows = context.samples * context.ranks * largest.owners
    speeds, bits_are_equal = measure(
        context.gathering, context.reducing, largest, rows, context.dtype
    )
    speeds = replace(speeds, product_flop_per_s=context.workers * speeds.product_flop_per_s)
    if not bits_are_equal:
        if setting == "always":
            raise EnvironmentLacks(
                f'sufficient_factors = "always": {_DIFFERENT_BITS}, so the weights of the ranks '
                'would become different; use processors of one kind, or "never"'
            )
        return FactorChoice(setting=setting, layers=by_bytes, speeds=speeds, reason=_DIFFERENT_BITS)
    return FactorChoice(setting=setting, layers=_choices(shapes, context, speeds), speeds=speeds)


def _choices(
    shapes: Mapping[str, FactorShape], context: ChoiceContext, speeds: Speeds | None
) -> tuple[LayerChoice, ...]:
    """Return both costs of each layer. Without speeds no layer sends factors."""
    found = []
    for name, shape in shapes.items():
        reduced = all_reduce_cost(shape, context.ranks, speeds)
        item_bytes = context.dtype.itemsize
        gathered = factor_cost(shape, context.samples, item_bytes, context.ranks, speeds)
        is_faster = (
            reduced.seconds is not None
            and gathered.seconds is not None
            and gathered.seconds < reduced.seconds
        )
        sends = speeds is not None and (context.setting == "always" or is_faster)
        found.append(
            LayerChoice(layer=name, all_reduce=reduced, factors=gathered, sends_factors=sends)
        )
    return tuple(found)


def _saves_bytes(choice: LayerChoice) -> bool:
    return choice.factors.sent_bytes < choice.all_reduce.sent_bytes
