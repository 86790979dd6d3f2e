"""What one [[trials]] entry may combine: strategy, counts, transport, reduction, device, nodes."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from paceline.spec.communication_rules import SPARK_NATIVE, communication_faults
from paceline.spec.counts import DEFAULT_HYBRID_STAGES, counts_if_known, number, stages_given
from paceline.spec.tune_rules import best_faults, is_filled_in

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.spec.models import Experiment, TrialRequest, WorkloadRequest

_ONE_PROCESS = ("sequential", "intraop", "threads")
_PIPELINED = ("pipeline", "hybrid")
_JOIN_MPI = ("mpi", "spark")  # launchers whose ranks can be one MPI job
_REPLICATED = ("threads", "processes", "hybrid")
# key -> the strategies that it means something to
_MEANT_FOR = {
    "replicas": _REPLICATED,
    "stages": _PIPELINED,
    "micro_batches": _PIPELINED,
    "schedule": _PIPELINED,
    "balance": _PIPELINED,
    "split_points": _PIPELINED,
    "reduction": ("processes",),
}
# What a strategy of one replica or one stage would be.
_SINGLE = {
    ("threads", "replicas"): "sequential",
    ("processes", "replicas"): "sequential",
    ("hybrid", "replicas"): "pipeline",
    ("pipeline", "stages"): "sequential",
    ("hybrid", "stages"): "processes",
}
# The count that a strategy otherwise takes from the cores.
_FROM_CORES = {
    "intraop": "threads_per_rank",
    "threads": "replicas",
    "processes": "ranks_per_node",
    "pipeline": "stages",
    "hybrid": "replicas",
}


def trial_faults(trial: TrialRequest, experiment: Experiment) -> Iterator[str]:
    """Faults that show without a look at workloads or machines."""
    yield from _workload_faults(trial, experiment)
    yield from _meaningless_keys(trial)
    yield from count_faults(trial)
    if trial.local_strategy == "best":
        yield from best_faults(trial, experiment)
    else:
        yield from _cut_faults(trial)
        yield from _reduction_faults(trial)
        if trial.device == "cuda":
            yield from _cuda_faults(trial)
    if trial.local_strategy != "best" or trial.nodes > 1:
        yield from _transport_faults(trial)
    if trial.nodes > 1:
        yield from _multi_node_faults(trial, experiment)
    yield from communication_faults(trial)


def has_peers(trial: TrialRequest) -> bool:
    """Whether it has several ranks, whatever their number."""
    return trial.nodes > 1 or trial.local_strategy not in _ONE_PROCESS


def applies(trial: TrialRequest, workload: WorkloadRequest) -> bool:
    """Whether the trial is for this workload; it is for all where it names none."""
    return trial.workloads is None or workload.name in trial.workloads


def _workload_faults(trial: TrialRequest, experiment: Experiment) -> Iterator[str]:
    known = [workload.name for workload in experiment.workloads]
    for name in trial.workloads or ():
        if name not in known:
            yield (
                f"workloads: expected some of this spec's [[workloads]] ({', '.join(known)}), "
                f'got "{name}"'
            )


def _meaningless_keys(trial: TrialRequest) -> Iterator[str]:
    for key, strategies in _MEANT_FOR.items():
        if getattr(trial, key) is None or trial.local_strategy in strategies:
            continue
        if trial.local_strategy == "best":
            yield f'{key}: the search finds it for "best"; leave it out, or name the strategy'
        else:
            yield (
                f'{key}: means nothing to "{trial.local_strategy}"; leave it out, or use '
                f"local_strategy = {_either(strategies)}"
            )


def count_faults(trial: TrialRequest) -> Iterator[str]:
    """Numbers of ranks, threads, replicas and stages that are too few or contradict each other."""
    if trial.local_strategy == "best":
        for key in ("ranks_per_node", "threads_per_rank"):
            if getattr(trial, key) != "auto":
                yield f'{key}: the search finds it for "best"; leave it out, or name the strategy'
        return
    faults = [*_process_faults(trial), *_too_few(trial)]
    yield from faults
    if not faults:
        yield from _disagreements(trial)


def _process_faults(trial: TrialRequest) -> Iterator[str]:
    strategy, ranks, threads = trial.local_strategy, trial.ranks_per_node, trial.threads_per_rank
    if strategy in _ONE_PROCESS and ranks not in (1, "auto"):
        yield f'ranks_per_node: "{strategy}" is one process a node, got {ranks}'
    if strategy == "sequential" and threads not in (1, "auto"):
        yield (
            f'threads_per_rank: "sequential" is one thread, got {threads}; '
            'the framework\'s own threads are local_strategy = "intraop"'
        )


def _too_few(trial: TrialRequest) -> Iterator[str]:
    strategy = trial.local_strategy
    for key in ("replicas", "stages"):
        single = _SINGLE.get((strategy, key))
        if single is not None and getattr(trial, key) == 1:
            yield (
                f'{key}: "{strategy}" needs at least 2, got 1; with one it is '
                f'local_strategy = "{single}"'
            )
    if strategy not in _ONE_PROCESS and trial.ranks_per_node == 1:
        yield f'ranks_per_node: "{strategy}" needs at least 2, got 1'
    if strategy == "threads" and number(trial.replicas) is None and trial.threads_per_rank == 1:
        yield 'threads_per_rank: "threads" needs at least 2, one for each replica, got 1'


def _disagreements(trial: TrialRequest) -> Iterator[str]:
    strategy, ranks = trial.local_strategy, number(trial.ranks_per_node)
    replicas, stages = number(trial.replicas), stages_given(trial)
    threads = number(trial.threads_per_rank)
    if strategy == "threads" and replicas and threads and threads % replicas:
        yield (
            f"threads_per_rank: those of all {replicas} replicas together, expected a multiple of "
            f"{replicas}, got {threads}; use {-(-threads // replicas) * replicas}"
        )
    if strategy == "processes" and ranks and replicas and ranks != replicas:
        yield (
            f"replicas: each process is one, expected {ranks} as ranks_per_node, got {replicas}; "
            "leave one of the two out"
        )
    if strategy == "pipeline" and ranks and stages and ranks != stages:
        yield (
            f"ranks_per_node: each stage is one, expected {stages}, got {ranks}; leave it out, or "
            'use local_strategy = "hybrid" for several replicas'
        )
    if strategy == "hybrid" and ranks:
        yield from _hybrid_disagreements(ranks, replicas, stages)


def _hybrid_disagreements(ranks: int, replicas: int | None, stages: int | None) -> Iterator[str]:
    if replicas and stages:
        if ranks != replicas * stages:
            yield (
                f"ranks_per_node: expected replicas x stages = {replicas * stages}, got {ranks}; "
                "leave one of the three out"
            )
        return
    parts, name = (
        (replicas, "replicas") if replicas else (stages or DEFAULT_HYBRID_STAGES, "stages")
    )
    if ranks % parts or ranks < 2 * parts:
        yield (
            f"ranks_per_node: expected a multiple of the {parts} {name}, at least {2 * parts}, "
            f"got {ranks}"
        )


def _cut_faults(trial: TrialRequest) -> Iterator[str]:
    split_points, stages = trial.split_points, number(trial.stages)
    if split_points is None or trial.local_strategy not in _PIPELINED:
        return
    if trial.balance is not None:
        yield f'balance: split_points are given; leave out balance = "{trial.balance}"'
    if any(low >= high for low, high in pairwise(split_points)):
        yield (
            f"split_points: expected layers in ascending order, each once, got {list(split_points)}"
        )
    if stages is not None and stages != len(split_points) + 1:
        yield (
            f"split_points: {stages} stages have {stages - 1}, got {len(split_points)}; use "
            f"stages = {len(split_points) + 1} or leave it out"
        )


def _transport_faults(trial: TrialRequest) -> Iterator[str]:
    strategy, transport = trial.local_strategy, trial.transport
    if transport is None:
        return
    if not has_peers(trial):
        if transport != "none":
            yield f'transport: one rank has no peers, expected "none", got "{transport}"'
        return
    if transport == "none":
        yield (
            "transport: several ranks must average gradients, expected "
            f'{_either(_transports(trial))}, got "none"'
        )
    if transport == "mpi" and trial.launcher not in _JOIN_MPI:
        yield (
            f'transport: "mpi" needs launcher = {_either(_JOIN_MPI)}, got "{trial.launcher}"; '
            'use transport = "gloo" there'
        )
    if transport == "shared" and trial.nodes > 1:
        yield (
            f'transport: "shared" is the memory of one node, got nodes = {trial.nodes}; use '
            f"{_either(_transports(trial))} (within each node, memory carries it anyway)"
        )
    if transport == "nccl" and (trial.device != "cuda" or strategy != "processes"):
        yield (
            'transport: "nccl" needs device = "cuda" and local_strategy = "processes", got '
            f'"{trial.device}" and "{strategy}"; use {_either(_transports(trial))}'
        )
    if transport in ("gloo", "mpi") and trial.nodes == 1 and strategy in _PIPELINED:
        yield (
            f'transport: the stages of a node hand on through its memory, expected "shared", got '
            f'"{transport}"; leave it out'
        )


def _transports(trial: TrialRequest) -> tuple[str, ...]:
    """Those that the trial's ranks could use."""
    if trial.nodes == 1 and trial.local_strategy in _PIPELINED:
        return ("shared",)
    if trial.device == "cuda":
        return ("nccl", "gloo") if trial.local_strategy == "processes" else ("gloo",)
    between: tuple[str, ...] = ("gloo", "mpi") if trial.launcher in _JOIN_MPI else ("gloo",)
    if trial.launcher == "spark" and trial.local_strategy == "processes":
        between += SPARK_NATIVE
    return between if trial.nodes > 1 else ("shared", *between)


def _reduction_faults(trial: TrialRequest) -> Iterator[str]:
    if trial.reduction is None or trial.local_strategy != "processes":
        return
    if trial.nodes == 1:
        yield (
            "reduction: is about processes on several nodes, got nodes = 1; leave it out "
            '(on one node, transport = "shared" or "gloo" is the choice)'
        )
    elif trial.device == "cuda" and trial.reduction == "hierarchical":
        yield 'reduction: "hierarchical" is in the memory of CPUs; on GPUs use "flat"'


def _cuda_faults(trial: TrialRequest) -> Iterator[str]:
    strategy, transport = trial.local_strategy, trial.transport
    if strategy == "intraop":
        yield (
            'device: "intraop" is about threads of the CPU, expected "cpu", got "cuda"; '
            'one GPU alone is local_strategy = "sequential"'
        )
    elif strategy == "threads":
        yield (
            'device: "threads" are replicas in one process, on GPUs there is one process a GPU; '
            'use local_strategy = "processes"'
        )
    elif trial.nodes == 1 and counts_if_known(trial) is None:
        yield (
            f'device: with "cuda" say {_FROM_CORES[strategy]} as a number; this machine\'s cores '
            "say nothing of its GPUs"
        )
    if has_peers(trial) and transport == "mpi":
        yield (
            f'transport: "mpi" carries the memory of CPUs, on GPUs use '
            f"{_either(_transports(trial))}"
        )
    if strategy == "processes" and transport == "shared" and trial.nodes == 1:
        yield 'transport: "shared" is the memory of CPUs, on GPUs use "nccl" or "gloo"'


def _multi_node_faults(trial: TrialRequest, experiment: Experiment) -> Iterator[str]:
    if trial.launcher in ("local", "torchrun"):
        yield (
            f'nodes: launcher "{trial.launcher}" starts ranks on this node only, got '
            f'{trial.nodes}; use launcher = "mpi" or "spark"'
        )
    if experiment.network.interface is None:
        yield (
            "nodes: ranks on several nodes need an interface to talk over; "
            'add [network] interface = "eth0" (as `ip addr` names it)'
        )
    if not is_filled_in(trial, experiment):
        yield from open_count_faults(trial)


def open_count_faults(trial: TrialRequest) -> Iterator[str]:
    """On several nodes, counts that only this machine's cores would say."""
    if trial.nodes > 1 and trial.local_strategy != "best" and counts_if_known(trial) is None:
        yield (
            f"nodes: on several nodes say {_FROM_CORES[trial.local_strategy]} as a number; "
            "this machine's cores say nothing of theirs"
        )


def _either(words: tuple[str, ...]) -> str:
    *first, last = (f'"{word}"' for word in words)
    return f"{', '.join(first)} or {last}" if first else last
