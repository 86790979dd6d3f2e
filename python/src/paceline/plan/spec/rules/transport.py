"""Which transports can join a trial's ranks, and which one is the default."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from paceline.base.errors import UsageError
from paceline.plan.spec.descriptors import StrategyDescriptor, TransportDescriptor
from paceline.plan.spec.extensions import LAUNCHERS, STRATEGIES, TRANSPORTS, quoted
from paceline.plan.spec.models import Experiment, TrialRequest
from paceline.plan.spec.values import BEST


def strategy_of(request: TrialRequest) -> StrategyDescriptor | None:
    """Return the strategy's descriptor; None for "best" and for an unknown name."""
    name = request.local_strategy
    return STRATEGIES.get(name) if name in STRATEGIES else None


def has_peers(request: TrialRequest) -> bool:
    """Return whether the trial has several ranks, whatever their number."""
    strategy = strategy_of(request)
    return request.nodes > 1 or strategy is None or strategy.has_peers_on_node


def transport_of(request: TrialRequest) -> str | None:
    """Return the transport of a request: the named one, or else the usable one of highest priority.

    None for an unknown launcher or strategy, and for "best" on one node, which brings its own.
    """
    if request.transport is not None:
        return request.transport
    is_open = strategy_of(request) is None and (
        request.nodes == 1 or request.local_strategy != BEST
    )
    if is_open or request.launcher not in LAUNCHERS:
        return None
    priorities = _priorities(request)
    return max(priorities, key=lambda name: priorities[name], default=None)


def chosen_transport(request: TrialRequest) -> str:
    """Return the transport of a request without faults.

    Raises UsageError if no installed one can join its ranks.
    """
    name = transport_of(request)
    if name is None:
        raise UsageError("transport: no installed transport can join these ranks")
    return name


def with_common_transports(experiment: Experiment) -> Experiment:
    """Give all trials on the same nodes that name no transport the same one.

    Otherwise a comparison of launchers would compare their default transports, too. On one node the
    default depends on the strategy, so each strategy has one. Without a default that all can use,
    each trial keeps its own.
    """
    trials = list(experiment.trials)
    groups: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for place, request in enumerate(trials):
        if request.transport is None and has_peers(request) and transport_of(request) is not None:
            strategy = request.local_strategy if request.nodes == 1 else None
            groups[request.nodes, request.device, strategy].append(place)
    for places in groups.values():
        defaults = [_defaults(trials[place]) for place in places]
        common = set(defaults[0]).intersection(*defaults)
        if len({transport_of(trials[place]) for place in places}) == 1 or not common:
            continue
        name = max(common, key=lambda each: min(priorities[each] for priorities in defaults))
        for place in places:
            trials[place] = trials[place].model_copy(update={"transport": name})
    return experiment.model_copy(update={"trials": tuple(trials)})


def _defaults(request: TrialRequest) -> dict[str, int]:
    """Return the transports that may be the default of a request, with their priorities.

    Those that lack a transport's key which the request has are left out.
    """
    own = {key for each in TRANSPORTS.all() for key in each.Keys.model_fields}
    keys = own & set(request.extension_keys)
    return {
        name: priority
        for name, priority in _priorities(request).items()
        if keys <= set(TRANSPORTS.get(name).Keys.model_fields)
    }


def _priorities(request: TrialRequest) -> dict[str, int]:
    """Return the priorities of the usable transports that may be the default."""
    found = {transport.name: transport.auto_priority(request) for transport in _usable(request)}
    return {name: priority for name, priority in found.items() if priority is not None}


def transport_faults(request: TrialRequest) -> Iterator[str]:
    """Yield why the named transport cannot join the trial's ranks, with those that can."""
    name = request.transport
    if name is None or name not in TRANSPORTS or request.launcher not in LAUNCHERS:
        return
    for reason in _reasons(TRANSPORTS.get(name), request):
        usable = tuple(transport.name for transport in _usable(request))
        use = f"; use {quoted(usable)}" if usable else ""
        yield f"transport: {reason}{use}"


def _usable(request: TrialRequest) -> list[TransportDescriptor]:
    return [t for t in TRANSPORTS.all() if not any(_reasons(t, request))]


def _reasons(transport: TransportDescriptor, request: TrialRequest) -> Iterator[str]:
    """Yield why this transport cannot join the trial's ranks."""
    if transport.joins_ranks and not has_peers(request):
        yield f'"{transport.name}" joins several ranks, and the trial has a single one'
        return
    if not transport.joins_ranks and has_peers(request):
        yield f'"{transport.name}" is for a single rank, and several ranks must average gradients'
        return
    if not transport.joins_ranks:
        return
    launcher, strategy = LAUNCHERS.get(request.launcher), strategy_of(request)
    if transport.needs is not None and transport.needs not in launcher.provides:
        able = tuple(each.name for each in LAUNCHERS.all() if transport.needs in each.provides)
        yield f'"{transport.name}" needs launcher = {quoted(able)}, got "{request.launcher}"'
    if request.device not in transport.devices:
        yield (
            f'"{transport.name}" carries the memory of {quoted(transport.devices)} devices, '
            f'got device = "{request.device}"'
        )
    if request.nodes > 1 and not transport.spans_nodes:
        yield f'"{transport.name}" joins the ranks of one node, got nodes = {request.nodes}'
    if strategy is None:
        return
    if strategy.needs_messages and not transport.sends_messages:
        yield (
            f'"{transport.name}" does not send messages between two ranks, which '
            f'"{strategy.name}" needs'
        )
        return
    if strategy.needs_process_group and not transport.opens_process_group:
        yield (f'"{transport.name}" opens no process group of torch, which "{strategy.name}" needs')
        return
    if transport.joins_flat_only and not strategy.can_reduce_flat:
        able = tuple(each.name for each in STRATEGIES.all() if each.can_reduce_flat)
        yield f'"{transport.name}" needs local_strategy = {quoted(able)}, got "{strategy.name}"'
    elif request.nodes == 1 and strategy.uses_node_memory and transport.spans_nodes:
        yield (
            f'"{transport.name}" is not used within a node, where the ranks of '
            f'"{strategy.name}" exchange data through memory'
        )
    yield from transport.faults(request)
