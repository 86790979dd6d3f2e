"""Rules for one [[trials]] entry: its names, its keys, its counts, and how they go together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from paceline.base.errors import UsageError
from paceline.plan.spec.descriptors import Compression, Descriptor
from paceline.plan.spec.extensions import (
    COMPRESSIONS,
    LAUNCHERS,
    STRATEGIES,
    TRANSPORTS,
    NamedChoices,
    quoted,
)
from paceline.plan.spec.models import Experiment, TrialRequest, WorkloadRequest, keys_of_tables
from paceline.plan.spec.placement import NodeCounts
from paceline.plan.spec.reduction import StepReduction
from paceline.plan.spec.rules.transport import strategy_of, transport_faults, transport_of
from paceline.plan.spec.sentences import no_such_key, sentences
from paceline.plan.spec.values import BEST, bits_per_s

_GROUPS: dict[str, NamedChoices[Any]] = {
    "local_strategy": STRATEGIES,
    "transport": TRANSPORTS,
    "launcher": LAUNCHERS,
    "compression": COMPRESSIONS,
}
_FEW_CORES, _MANY_CORES = 1, 2**20


def trial_faults(request: TrialRequest, experiment: Experiment) -> list[str]:
    """Return the faults that show without a look at workloads or machines."""
    faults = [*_workload_faults(request, experiment), *name_faults(request)]
    if faults:
        return faults
    faults = list(key_faults(request))
    if any(value_faults(request)):
        return faults
    return faults + list(_combination_faults(request, experiment))


def _combination_faults(request: TrialRequest, experiment: Experiment) -> Iterator[str]:
    counts = list(count_faults(request))
    yield from counts
    strategy = strategy_of(request)
    if strategy is None:
        yield from _best_faults(request, experiment)
    else:
        yield from strategy.faults(request, experiment)
        if request.device == "cuda" and not counts:
            yield from _cuda_faults(request)
    if request.local_strategy != BEST or request.nodes > 1:
        yield from transport_faults(request)
    if request.nodes > 1:
        yield from _multi_node_faults(request, experiment, has_count_faults=bool(counts))
    if request.link is not None:
        yield from _link_faults(request, request.link)
    transport = transport_of(request)
    if transport is not None and not counts:
        yield from TRANSPORTS.get(transport).key_faults(request)


def _workload_faults(request: TrialRequest, experiment: Experiment) -> Iterator[str]:
    known = [workload.name for workload in experiment.workloads]
    for name in request.workloads or ():
        if name not in known:
            yield (
                f"workloads: expected names of this spec's [[workloads]] ({', '.join(known)}), "
                f'got "{name}"'
            )


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


def _link_faults(request: TrialRequest, link: str) -> Iterator[str]:
    if request.nodes == 1:
        yield f'link: "{link}" is a rate between nodes, got nodes = 1; remove it'
    try:
        bits_per_s(link, "link")
    except UsageError as error:
        yield str(error)


def _best_faults(request: TrialRequest, experiment: Experiment) -> Iterator[str]:
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


# --- names and keys of extensions -----------------------------------------------------------------


def name_faults(request: TrialRequest) -> Iterator[str]:
    """Yield names that no installed extension has."""
    for key, name in _names(request).items():
        is_search = key == "local_strategy" and name == BEST
        if name is not None and name not in _GROUPS[key] and not is_search:
            yield _GROUPS[key].unknown(name)


def key_faults(request: TrialRequest) -> Iterator[str]:
    """Yield keys that the chosen extensions do not have, and values that they do not allow."""
    used = chosen(request)
    for key in request.extension_keys:
        if not any(key in descriptor.Keys.model_fields for descriptor in used.values()):
            yield _misplaced(key, request, used)
    yield from value_faults(request)


def value_faults(request: TrialRequest) -> Iterator[str]:
    """Yield values of extension keys that the chosen extensions do not allow."""
    for model in {descriptor.Keys for descriptor in chosen(request).values()}:
        try:
            request.keys(model)
        except ValidationError as error:
            yield from sentences(error.errors())


def _misplaced(key: str, request: TrialRequest, used: dict[str, Descriptor | Compression]) -> str:
    """Return the message for a key that belongs to other extensions, or to none."""
    for kind, group in _GROUPS.items():
        owners = tuple(d.name for d in group.all() if key in d.Keys.model_fields)
        if not owners:
            continue
        if kind == "local_strategy" and request.local_strategy == BEST:
            return f'{key}: the search finds it for "best"; remove it, or name the strategy'
        name = f'{kind} "{used[kind].name}"' if kind in used else f"a trial without {kind}"
        return f"{key}: has no meaning for {name}; remove it, or use {kind} = {quoted(owners)}"
    known = [*TrialRequest.model_fields, *declared_keys()]
    return f"{key}: {no_such_key(key, known, keys_of_tables())}"


def chosen(request: TrialRequest) -> dict[str, Descriptor | Compression]:
    """Return the descriptors that a request uses, by the key that names them.

    A transport that the entry does not name is the default one. The local strategy "best" and
    unknown names are left out.
    """
    names = {**_names(request), "transport": transport_of(request)}
    return {key: group.get(str(n)) for key, group in _GROUPS.items() if (n := names[key]) in group}


def _names(request: TrialRequest) -> dict[str, str | None]:
    """Return the names that the request gives, by the key that gives them."""
    return {key: getattr(request, key, None) for key in _GROUPS}


def accepts(request: TrialRequest, key: str) -> bool:
    """Return whether an extension that the request uses has this key."""
    return any(key in descriptor.Keys.model_fields for descriptor in chosen(request).values())


def declared_keys() -> list[str]:
    """Return every key that extensions add to a [[trials]] entry."""
    descriptors = (descriptor for group in _GROUPS.values() for descriptor in group.all())
    return sorted({key for descriptor in descriptors for key in descriptor.Keys.model_fields})


# --- counts of ranks, threads and replicas --------------------------------------------------------


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


def counts_on_node(request: TrialRequest, cores: int) -> NodeCounts:
    """Return the counts on a node with `cores` cores, for a request without faults.

    A given number stands, and what follows from the given ones is computed from them; only the rest
    depends on the cores. Raises UsageError for "best", which a search has to find first.
    """
    if request.local_strategy == BEST:
        raise UsageError(
            'local_strategy: "best" is the result of a search; run `paceline tune local SPEC`, '
            "then the spec that it writes"
        )
    return STRATEGIES.get(request.local_strategy).counts(request, cores)


def counts_if_known(request: TrialRequest) -> NodeCounts | None:
    """Return the counts if they do not depend on the node's cores, else None.

    Counts grow with the cores, so they do not depend on them if one core and very many give the
    same.
    """
    if request.local_strategy == BEST:
        return None
    few = counts_on_node(request, _FEW_CORES)
    return few if few == counts_on_node(request, _MANY_CORES) else None


def reduction_of(request: TrialRequest) -> StepReduction | None:
    """Return how the trial's gradients become new weights; None if it is not known yet.

    That is before a search for "best", and with counts that cannot be. The options are planned for
    a node of one core and one sample: neither changes how workers reduce.
    """
    strategy, transport = strategy_of(request), transport_of(request)
    if strategy is None or transport is None or not are_counts_valid(request):
        return None
    counts = counts_on_node(request, _FEW_CORES)
    return strategy.reduction(transport, strategy.options(request, counts, 1, transport))


def batch_per_replica(global_batch: int, replicas: int) -> int:
    """Return the samples of a full batch that each replica of all nodes gets.

    Raises UsageError if the batch cannot be divided equally.
    """
    if global_batch % replicas:
        raise UsageError(
            f"a global batch of {global_batch} cannot be divided among {replicas} replicas; "
            f"use a multiple of {replicas}, for example "
            f"{-(-global_batch // replicas) * replicas}"
        )
    return global_batch // replicas


# --- facts of an entry ----------------------------------------------------------------------------


def applies(request: TrialRequest, workload: WorkloadRequest) -> bool:
    """Return whether the trial runs this workload; one that names none runs all."""
    return request.workloads is None or workload.name in request.workloads


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
