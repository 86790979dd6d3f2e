"""Keys and options of transports that send gradients in buckets through torch.distributed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, Self

from pydantic import Field

from paceline.plan.spec.descriptors import KeyModel, OptionModel, TransportDescriptor
from paceline.plan.spec.extensions import COMPRESSIONS, TRANSPORTS
from paceline.plan.spec.models import TrialRequest
from paceline.plan.spec.placement import Placement
from paceline.plan.spec.rules.transport import transport_of
from paceline.plan.spec.rules.trial import reduction_of
from paceline.plan.spec.values import PositiveFloat, PositiveInt
from paceline.plan.trials.trial import Trial

DEFAULT_BUCKET_MB = 25.0  # as in torch's DistributedDataParallel
# How gradients of linear layers cross the network: "auto" chooses for each layer by its costs.
FactorSetting = Literal["auto", "always", "never"]


class GradientKeys(KeyModel):
    """Keys of a transport that sends gradients."""

    bucket_mb: PositiveFloat | None = None  # gradients in one message
    buckets_in_flight: PositiveInt | None = None
    bucket_wait_ms: PositiveFloat | None = None  # in which gradients gather for one message
    compression: str | None = None
    sufficient_factors: FactorSetting | None = None


class CompressionSettings(OptionModel):
    """A method of gradient compression and its numbers."""

    method: str
    numbers: dict[str, int | float] = Field(default_factory=dict)

    def __str__(self) -> str:
        """Return `powersgd 4`, `topk 0.01` or `bf16`."""
        return " ".join([self.method, *(f"{value:.3g}" for value in self.numbers.values())])


class GradientOptions(OptionModel):
    """Planned options of a transport that sends gradients."""

    bucket_mb: float = DEFAULT_BUCKET_MB
    buckets_in_flight: int | None = Field(default=None, ge=1)  # None: as they become ready
    bucket_wait_ms: float | None = Field(default=None, gt=0)  # None: buckets are fixed
    compression: CompressionSettings | None = None
    sufficient_factors: FactorSetting = "auto"

    @property
    def inexact_reason(self) -> str | None:
        if self.compression is None:
            return None
        return f"gradients are compressed ({self.compression})"

    def exact_form(self) -> Self:
        return self.model_copy(update={"compression": None})

    def name_parts(self, placement: Placement) -> Iterator[str]:
        if self.bucket_mb != DEFAULT_BUCKET_MB:
            yield f"b{self.bucket_mb:g}"
        if self.buckets_in_flight is not None:
            yield f"f{self.buckets_in_flight}"
        if self.bucket_wait_ms is not None:
            yield f"w{self.bucket_wait_ms:g}"
        if self.compression is not None:  # not `bf16` alone, which is a precision
            yield "send-" + str(self.compression).replace(" ", "")
        if self.sufficient_factors != "auto":
            yield f"factors-{self.sufficient_factors}"

    def labels(self) -> Iterator[str]:
        if self.bucket_mb != DEFAULT_BUCKET_MB:
            yield f"{self.bucket_mb:g} MB buckets"
        if self.buckets_in_flight is not None:
            yield f"{self.buckets_in_flight} in flight"
        if self.bucket_wait_ms is not None:
            yield f"{self.bucket_wait_ms:g} ms wait"
        if self.compression is not None:
            yield f"send {self.compression}"
        if self.sufficient_factors != "auto":
            yield f"factors {self.sufficient_factors}"


def gradient_options_of(trial: Trial) -> GradientOptions:
    """Return the trial's own options, or the defaults where its transport has none."""
    own = (each for each in trial.options if isinstance(each, GradientOptions))
    return next(own, GradientOptions())


class GradientTransport(TransportDescriptor):
    """A transport that torch.distributed calls for each bucket of gradients."""

    Keys = GradientKeys
    Options = GradientOptions
    sends_gradients = True
    keys_of_own_training = tuple(GradientKeys.model_fields)

    def key_faults(self, request: TrialRequest) -> Iterator[str]:
        reduction, keys = reduction_of(request), request.keys(GradientKeys)
        if reduction is None or not reduction.in_buckets:
            for key in ("bucket_mb", "buckets_in_flight", "bucket_wait_ms"):
                if getattr(keys, key) is not None:
                    yield (
                        f"{key}: has no meaning where gradients are not reduced bucket by bucket; "
                        'remove it, or use local_strategy = "processes" (on several nodes with '
                        'reduction = "flat")'
                    )
        yield from _wait_faults(request, keys)
        sends_weights = reduction is not None and reduction.averages_weights
        if keys.compression is not None and sends_weights:
            yield (
                "compression: compresses gradients, but averaging_period_steps exchanges weights; "
                "use one of the two"
            )
        if keys.sufficient_factors == "always":
            yield from _factor_faults(request, keys, sends_weights=sends_weights)

    def options(self, request: TrialRequest) -> GradientOptions:
        return GradientOptions(**planned_options(request))


def _wait_faults(request: TrialRequest, keys: GradientKeys) -> Iterator[str]:
    """Yield what contradicts a wait before each reduction."""
    if keys.bucket_wait_ms is None:
        return
    for key in ("buckets_in_flight", "compression"):
        if getattr(keys, key) is not None:
            yield f"bucket_wait_ms: expected no {key}, got both; use one of the two"
    if request.device == "cuda":
        yield 'bucket_wait_ms: expected device = "cpu", got "cuda"; remove it'


def _factor_faults(
    request: TrialRequest, keys: GradientKeys, *, sends_weights: bool
) -> Iterator[str]:
    """Yield what contradicts the exchange of factors."""
    if keys.compression is not None:
        yield (
            'sufficient_factors: "always" sends factors, but compression compresses gradients; use '
            "one of the two"
        )
    if request.device == "cuda":
        yield 'sufficient_factors: "always" needs device = "cpu", got "cuda"; remove it'
    transport = transport_of(request)
    if transport is not None and TRANSPORTS.get(transport).joins_flat_only:
        yield (
            'sufficient_factors: "always" needs a second process group of all ranks, which '
            f'transport "{transport}" does not have; use "gloo" or "mpi"'
        )
    if sends_weights:
        yield (
            'sufficient_factors: "always" replaces gradients, but averaging_period_steps exchanges '
            "weights; use one of the two"
        )


def planned_options(request: TrialRequest) -> dict[str, Any]:
    """Return the values of GradientOptions, with defaults filled in."""
    keys = request.keys(GradientKeys)
    compression = None
    if keys.compression is not None:
        numbers = COMPRESSIONS.get(keys.compression).numbers(request)
        compression = CompressionSettings(method=keys.compression, numbers=numbers)
    return {
        "bucket_mb": keys.bucket_mb or DEFAULT_BUCKET_MB,
        "buckets_in_flight": keys.buckets_in_flight,
        "bucket_wait_ms": keys.bucket_wait_ms,
        "compression": compression,
        "sufficient_factors": keys.sufficient_factors or "auto",
    }
