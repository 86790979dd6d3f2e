"""Rules of [tune] and of `local_strategy = "best"`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.spec.choices import accepts, key_faults, name_faults
from paceline.spec.extensions import STRATEGIES, TRANSPORTS
from paceline.spec.transport_rules import has_peers, transport_of
from paceline.spec.values import BEST

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paceline.spec.models import Experiment, TrialRequest

# List of [tune] -> the key of a [[trials]] entry whose values it holds.
_LISTS = {
    "buckets_mb": "bucket_mb",
    "buckets_in_flight": "buckets_in_flight",
    "algorithms": "algorithm",
    "compressions": "compression",
    "mpi_parameters": "mpi_parameters",
}

_NAMES = ("algorithm", "compression")  # their values are names of extensions or of their keys


def has_layout(request: TrialRequest) -> bool:
    """Return whether any count or layout key is given, so that a search does not change it."""
    own = {key for strategy in STRATEGIES.all() for key in strategy.layout_key_names}
    given = {key for key, value in request.extension_keys.items() if value not in (None, "auto")}
    cores = (request.ranks_per_node, request.threads_per_rank)
    return bool(own & given) or any(count != "auto" for count in cores)


def is_filled_in(request: TrialRequest, experiment: Experiment) -> bool:
    """Return whether a search finds the trial's counts before it runs."""
    tune = experiment.tune
    if tune is None or has_layout(request):
        return False
    return tune.strategies is None or request.local_strategy in (BEST, *tune.strategies)


def best_faults(request: TrialRequest, experiment: Experiment) -> Iterator[str]:
    """Yield faults of a trial that wants the best strategy found."""
    if experiment.tune is None:
        yield (
            'local_strategy: "best" is the result of a search; add a table [tune], or name a '
            "strategy"
        )
    if request.device != "cpu":
        yield f'device: the search is among strategies on cores, got "{request.device}"'
    if request.transport is not None and request.nodes == 1:
        yield (
            "transport: on one node the best strategy brings its own, got "
            f'"{request.transport}"; remove it'
        )


def tune_faults(experiment: Experiment) -> Iterator[str]:
    """Yield unknown names, and lists of [tune] that no trial of the spec can use."""
    tune = experiment.tune
    if tune is None:
        return
    for place, name in enumerate(tune.strategies or (), start=1):
        if name not in STRATEGIES:
            yield STRATEGIES.unknown(name, f"tune.strategies[{place}]")
    for list_key, key in _LISTS.items():
        values = getattr(tune, list_key)
        if not values:
            continue
        able = [trial for trial in experiment.trials if _can_use(trial, key, values)]
        if not able:
            yield (
                f"tune.{list_key}: expected a trial that can use {key}, found none; remove the list"
            )
        elif key in _NAMES:
            yield from _value_faults(able[0], key, list_key, values)


def _can_use(request: TrialRequest, key: str, values: Sequence[Any]) -> bool:
    """Return whether the key has a meaning for the trial."""
    transport = transport_of(request)
    if transport is None or not has_peers(request) or not accepts(request, key):
        return False
    numbers = [value for value in values if value not in ("model", "unbounded")]
    tried = request.model_copy(update={key: numbers[0] if numbers else 1})
    faults = TRANSPORTS.get(transport).key_faults(tried)
    return not any(fault.startswith(f"{key}:") for fault in faults)


def _value_faults(
    request: TrialRequest, key: str, list_key: str, values: Sequence[str]
) -> Iterator[str]:
    """Yield values that the key cannot have."""
    for place, value in enumerate(values, start=1):
        tried = request.model_copy(update={key: value})
        for fault in (*name_faults(tried), *key_faults(tried)):
            if fault.startswith(f"{key}:"):
                yield f"tune.{list_key}[{place}]{fault.removeprefix(key)}"
