"""Rules for one [[trials]] entry, for [tune], and for `local_strategy = "best"`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from paceline.plan.spec.choices import accepts, key_faults, name_faults, value_faults
from paceline.plan.spec.counts import counts_if_known
from paceline.plan.spec.extensions import LAUNCHERS, STRATEGIES, TRANSPORTS, quoted
from paceline.plan.spec.models import Experiment, TrialRequest, WorkloadRequest
from paceline.plan.spec.transport_rules import (
    has_peers,
    strategy_of,
    transport_faults,
    transport_of,
)
from paceline.plan.spec.values import BEST

# List of [tune] -> the key of a [[trials]] entry whose values it holds.
_LISTS = {
    "buckets_mb": "bucket_mb",
    "buckets_in_flight": "buckets_in_flight",
    "algorithms": "algorithm",
    "compressions": "compression",
    "mpi_parameters": "mpi_parameters",
}

_NAMES = ("algorithm", "compression")  # their values are names of extensions or of their keys


def trial_faults(request: TrialRequest, experiment: Experiment) -> list[str]:
    """Return the faults that show without a look at workloads or machines."""
    faults = [*_workload_faults(request, experiment), *name_faults(request)]
    if faults:
        return faults
    faults = list(key_faults(request))
    if any(value_faults(request)):
        return faults
    return faults + list(_combination_faults(request, experiment))


def applies(request: TrialRequest, workload: WorkloadRequest) -> bool:
    """Return whether the trial runs this workload; one that names none runs all."""
    return request.workloads is None or workload.name in request.workloads


def count_faults(request: TrialRequest) -> Iterator[str]:
    """Yield numbers of ranks, threads and replicas that are too few or contradict each other."""
    strategy = strategy_of(request)
    if strategy is None:
        for key in ("ranks_per_node", "threads_per_rank"):
            if getattr(request, key) != "auto":
                yield f'{key}: the search finds it for "best"; remove it, or name the strategy'
        return
    ranks = request.ranks_per_node
    if not strategy.has_peers_on_node and ranks not in (1, "auto"):
        yield f'ranks_per_node: "{strategy.name}" has one process per node, got {ranks}'
    elif strategy.has_peers_on_node and ranks == 1:
        yield f'ranks_per_node: "{strategy.name}" needs at least 2, got 1'
    else:
        yield from strategy.count_faults(request)


def open_count_faults(request: TrialRequest) -> Iterator[str]:
    """Yield the count that only this machine's cores would give, on several nodes."""
    strategy = strategy_of(request)
    if request.nodes > 1 and strategy is not None and counts_if_known(request) is None:
        yield (
            f"nodes: on several nodes give {strategy.count_key} as a number; "
            "the cores of this machine do not tell those of the others"
        )


def are_counts_valid(request: TrialRequest) -> bool:
    """Return whether names, keys and counts are free of faults, so that counts can be computed."""
    return (
        not any(name_faults(request))
        and not any(value_faults(request))
        and not any(count_faults(request))
    )


def _workload_faults(request: TrialRequest, experiment: Experiment) -> Iterator[str]:
    known = [workload.name for workload in experiment.workloads]
    for name in request.workloads or ():
        if name not in known:
            yield (
                f"workloads: expected names of this spec's [[workloads]] ({', '.join(known)}), "
                f'got "{name}"'
            )


def _combination_faults(request: TrialRequest, experiment: Experiment) -> Iterator[str]:
    counts = list(count_faults(request))
    yield from counts
    strategy = strategy_of(request)
    if strategy is None:
        yield from best_faults(request, experiment)
    else:
        yield from strategy.faults(request, experiment)
        if request.device == "cuda" and not counts:
            yield from _cuda_faults(request)
    if request.local_strategy != BEST or request.nodes > 1:
        yield from transport_faults(request)
    if request.nodes > 1:
        yield from _multi_node_faults(request, experiment, has_count_faults=bool(counts))
    transport = transport_of(request)
    if transport is not None:
        yield from TRANSPORTS.get(transport).key_faults(request)


def _cuda_faults(request: TrialRequest) -> Iterator[str]:
    strategy = STRATEGIES.get(request.local_strategy)
    if strategy.without_cuda is not None:
        yield f"device: {strategy.without_cuda}"
    elif request.nodes == 1 and counts_if_known(request) is None:
        yield (
            f'device: with "cuda" give {strategy.count_key} as a number; '
            "the cores of this machine do not tell the number of its GPUs"
        )


def _multi_node_faults(
    request: TrialRequest, experiment: Experiment, *, has_count_faults: bool
) -> Iterator[str]:
    if not LAUNCHERS.get(request.launcher).spans_nodes:
        able = tuple(launcher.name for launcher in LAUNCHERS.all() if launcher.spans_nodes)
        yield (
            f'nodes: launcher "{request.launcher}" starts ranks on this node only, got '
            f"{request.nodes}; use launcher = {quoted(able)}"
        )
    if experiment.network.interface is None:
        yield (
            "nodes: ranks on several nodes need a network interface; "
            'add [network] interface = "eth0" (as `ip addr` names it)'
        )
    if not has_count_faults and not is_filled_in(request, experiment):
        yield from open_count_faults(request)


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
