"""Choose for each linear layer how its gradient crosses the network, the same on all ranks.

The choice depends on speeds that are measured before the first step, collectively and for about a
second: a transfer is repeated with twice the size until it takes long enough, and all ranks use the
time of the slowest one, so they stop at the same size and get equal results.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.base.errors import EnvironmentLacks
from paceline.base.torch_internals import all_gather_single
from paceline.measure.records.communication import FactorResult, StrategyResult
from paceline.plan.costs import (
    Cost,
    FactorShape,
    FactorSpeeds,
    LinearShape,
    all_gather_bytes,
    all_reduce_bytes,
    all_reduce_cost,
    factor_cost,
)
from paceline.plan.spec.extensions import TRANSPORTS
from paceline.plan.trials.trial import Trial
from paceline.train.training.tensors import weight_gradient
from paceline.train.transports.bucket_settings import FactorSetting, gradient_options_of

# Its product is measured where only embeddings have factors.
_ANY_SHAPE = LinearShape(inputs=1024, outputs=1024)
_DIFFERENT_BITS = "products of equal factors differ between the ranks' processors"
_SMALL_BYTES = 1024
_SMALL_REPEATS = 5
_FIRST_BYTES, _LARGEST_BYTES = 2**16, 2**23  # 64 KiB to 8 MiB
_LARGE_REPEATS = 3
# A token bucket or a socket buffer hides the speed of the link for some milliseconds.
_LONG_ENOUGH_S, _TYPICAL_S = 0.04, 0.2
_PRODUCT_ROWS_BYTES = 2**23  # a part of the gradient that fits no cache
_PRODUCT_REPEATS = 3


def setting_of(trial: Trial) -> FactorSetting:
    """Return the setting that a trial's training uses.

    "auto" means "never" within a node, on GPUs, with gradient compression, which is compared with
    all gradients, where no gradients are all-reduced, and where the transport has only one process
    group.
    """
    options = gradient_options_of(trial)
    may_send = (
        trial.placement.nodes > 1
        and trial.device == "cpu"
        and options.compression is None
        and not trial.reduction.divides_updates_among_nodes
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
    speeds: FactorSpeeds | None = None  # None: not measured, because no layer depends on them
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
    saves_bytes = any(c.factors.sent_bytes < c.all_reduce.sent_bytes for c in by_bytes)
    may_send = setting == "always" or (setting == "auto" and saves_bytes)
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
    shapes: Mapping[str, FactorShape], context: ChoiceContext, speeds: FactorSpeeds | None
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


def measure(
    group: dist.ProcessGroup | None,
    reducing: dist.ProcessGroup | None,
    largest: LinearShape,
    samples: int,
    dtype: torch.dtype,
) -> tuple[FactorSpeeds, bool]:
    """Return the speeds, and whether all ranks compute bit-identical products; collective over all
    ranks.

    group: gathers factors. reducing: sums gradients. Every rank belongs to one of each, and all
    groups transfer at the same time, as in training. largest: shape of the largest layer. samples:
    rows of its factors, of all ranks of the group.
    """
    ranks = dist.get_world_size(group)

    def gather(size: int) -> None:
        own = torch.zeros(size // 4)
        all_gather_single(torch.empty(ranks * len(own)), own, group=group)

    def reduce(size: int) -> None:
        dist.all_reduce(torch.zeros(size // 4), group=reducing)

    for transfer in (gather, reduce):
        transfer(_SMALL_BYTES)  # opens connections
    latency_s = min(_slowest_s(partial(gather, _SMALL_BYTES)) for _ in range(_SMALL_REPEATS))
    latency_s /= ranks - 1
    gather_bytes, gather_s = _long_enough(gather)
    reduce_bytes, reduce_s = _long_enough(reduce)
    flop_per_s, checksum = _product(largest, samples, dtype)
    speeds = FactorSpeeds(
        latency_s=latency_s,
        all_gather_bytes_per_s=all_gather_bytes(gather_bytes, ranks) / gather_s,
        all_reduce_bytes_per_s=all_reduce_bytes(reduce_bytes, ranks) / reduce_s,
        product_flop_per_s=-_largest(-flop_per_s),
    )
    return speeds, _largest(checksum) == -_largest(-checksum)


def _long_enough(transfer: Callable[[int], None]) -> tuple[int, float]:
    """Return a size and its time, for a size that takes long enough to show the speed.

    It is the shortest of some times, because other processes add to them; on a slow link, where a
    time is long enough to be typical, it is the first one.
    """
    size = _FIRST_BYTES
    while True:
        run = partial(transfer, size)
        took_s = _slowest_s(run)
        is_last = size == _LARGEST_BYTES
        if is_last or _LONG_ENOUGH_S <= took_s < _TYPICAL_S:
            took_s = min(took_s, *(_slowest_s(run) for _ in range(_LARGE_REPEATS - 1)))
        if is_last or took_s >= _LONG_ENOUGH_S:
            return size, took_s
        size *= 2


def _product(shape: LinearShape, samples: int, dtype: torch.dtype) -> tuple[float, float]:
    """Return the speed of a product of factors in flop/s, and a checksum of its bits."""
    rows = max(1, min(shape.outputs, _PRODUCT_ROWS_BYTES // (4 * shape.inputs)))
    generator = torch.Generator().manual_seed(0)

    def factor(features: int) -> Tensor:
        return torch.randn(samples, features, generator=generator).to(dtype)

    inputs, gradients = factor(shape.inputs), factor(rows)
    out = torch.empty(rows, shape.inputs)
    took_s = []
    for _ in range(1 + _PRODUCT_REPEATS):
        started_s = time.perf_counter()
        weight_gradient(inputs, gradients, out)
        took_s.append(time.perf_counter() - started_s)
    checksum = float(out.view(torch.int32).sum(dtype=torch.int64) % 2**50)
    return 2 * samples * rows * shape.inputs / min(took_s[1:]), checksum


def _slowest_s(run: Callable[[], None]) -> float:
    """Return the time of a collective on the slowest rank."""
    started_s = time.perf_counter()
    run()
    return _largest(time.perf_counter() - started_s)


def _largest(value: float) -> float:
    """Return the largest value of all ranks, on all ranks."""
    own = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(own, op=dist.ReduceOp.MAX)
    return float(own)
