"""Rules for one [[trials]] entry: strategy, counts, transport, device and nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.spec.choices import key_faults, name_faults, value_faults
from paceline.spec.counts import counts_if_known
from paceline.spec.extensions import LAUNCHERS, STRATEGIES, TRANSPORTS, quoted
from paceline.spec.transport_rules import strategy_of, transport_faults, transport_of
from paceline.spec.tune_rules import best_faults, is_filled_in
from paceline.spec.values import BEST

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.spec.models import Experiment, TrialRequest, WorkloadRequest


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
    launcher = LAUNCHERS.get(request.launcher)
    if request.nodes > 1:
        yield from _multi_node_faults(request, experiment, has_count_faults=bool(counts))
    yield from launcher.faults(request, experiment)
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
