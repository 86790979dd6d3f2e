"""`paceline tune comm`: search for the fastest communication settings, trial by trial.

Keys that a trial of the spec sets itself are kept. Names and defaults of MPI's parameters are those
of `ompi_info --all` of Open MPI 5.0.11. The effect of each on an all-reduce between two ranks of
one host was tried. It differs over a real network, so it is measured again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from typing import Any, Literal

from paceline.base.errors import EnvironmentLacks
from paceline.collectives.message_schedules import Algorithm
from paceline.plan.spec.extensions import TRANSPORTS
from paceline.plan.spec.models import Experiment, TrialRequest, TuneSettings, WorkloadRequest
from paceline.plan.spec.rules.transport import has_peers, transport_of
from paceline.plan.spec.rules.trial import accepts, applies, reduction_of
from paceline.plan.spec.values import BEST
from paceline.plan.trials.trial import Trial, task_facts
from paceline.runner.launchers.descriptors import MpiSettings
from paceline.runner.launchers.mpi.implementations import find_mpirun, unknown_parameters
from paceline.runner.tune.search import Findings
from paceline.runner.tune.session import Choices, Searched, SearchMethod, run_search
from paceline.runner.tune.spaces import SearchContext, SearchTarget, changed
from paceline.train.transports.bucket_settings import DEFAULT_BUCKET_MB, gradient_options_of

Keys = dict[str, Any]  # of a [[trials]] entry
Options = Callable[[TrialRequest, Trial, TuneSettings], list[Keys]]

BUCKETS_MB: tuple[float | Literal["model"], ...] = (1.0, 5.0, 25.0, 50.0, 100.0, "model")
BUCKETS_IN_FLIGHT: tuple[int | Literal["unbounded"], ...] = (1, 2, 4, "unbounded")
BUCKET_WAITS_MS: tuple[float, ...] = (1.0, 5.0)  # Horovod's cycle time is 1 ms, and was 5 ms
ALGORITHMS: tuple[Algorithm, ...] = (
    "auto", "native", "ring", "recursive-doubling", "rabenseifner", "hierarchical",
)  # fmt: skip

# Between hosts, by TCP.
_TCP: tuple[dict[str, str], ...] = (
    # large messages in fragments, so that reducing one overlaps with receiving the next (default:
    # a single fragment; 25 MB over loopback take 7 instead of 10 ms)
    {"btl_tcp_rdma_pipeline_frag_size": "1048576"},
    # socket buffers for links with a large bandwidth-delay product (default: the kernel decides)
    {"btl_tcp_sndbuf": "4194304", "btl_tcp_rcvbuf": "4194304"},
    {"btl_tcp_links": "2"},
    # eager sends without a handshake (default 65536, at most btl_tcp_max_send_size)
    {"btl_tcp_eager_limit": "131072"},
    # messages progress while no rank is inside MPI, at the cost of a thread
    {"btl_tcp_progress_thread": "1"},
)
# On one host, through shared memory.
_SHARED_MEMORY: tuple[dict[str, str], ...] = (
    # two copies through shared memory instead of one across processes (100 kB in half the time)
    {"smsc": "^cma"},
    {"btl_sm_eager_limit": "32768"},  # default 4096, at most btl_sm_max_send_size
)
# MPI's own all-reduce as a segmented ring (25 MB over loopback take 9 instead of 10 ms).
_NATIVE: tuple[dict[str, str], ...] = (
    {
        "coll_tuned_use_dynamic_rules": "true",
        "coll_tuned_allreduce_algorithm": "5",
        "coll_tuned_allreduce_algorithm_segmentsize": "1048576",
    },
)


def why_left_alone(request: TrialRequest) -> str | None:
    """Return why there is nothing to search for a trial of a spec; None if there is."""
    if not has_peers(request):
        return "one rank, nothing is sent"
    if request.local_strategy == BEST:
        return "which strategy is best, `paceline tune local` finds; run that first"
    transport = transport_of(request)
    if transport is None or not TRANSPORTS.get(transport).spans_nodes:
        return "ranks of one node share its memory, nothing is sent"
    uses = (in_buckets(request), accepts(request, "algorithm"), compresses(request))
    return None if any(uses) else f"{transport} leaves nothing to choose"


def in_buckets(request: TrialRequest) -> bool:
    """Return whether gradients are reduced bucket by bucket while the backward pass runs."""
    reduction = reduction_of(request)
    return reduction is not None and reduction.in_buckets and accepts(request, "bucket_mb")


def compresses(request: TrialRequest) -> bool:
    """Return whether what the trial sends in a step could be compressed."""
    reduction = reduction_of(request)
    sends_weights = reduction is not None and reduction.averages_weights
    return not sends_weights and accepts(request, "compression")


def sends_by_mpirun(request: TrialRequest) -> bool:
    """Return whether parameters of mpirun can change how the trial's gradients are sent."""
    return accepts(request, "mpi_parameters") and transport_of(request) == request.launcher


def given(request: TrialRequest, key: str) -> Any:
    """Return the value of an extension's key in a [[trials]] entry; None if it is not there."""
    return request.extension_keys.get(key)


def with_communication(request: TrialRequest, trial: Trial) -> TrialRequest:
    """Return a request with the communication settings of a trial, except keys that it sets
    itself."""
    found = {k: v for k, v in communication_of(trial).items() if not given(request, k)}
    return changed(request, **found)


def communication_of(trial: Trial) -> Keys:
    """Return the keys of a [[trials]] entry that mean this trial's communication; None is the
    default."""
    options, algorithm = gradient_options_of(trial), trial.option("algorithm")
    compression = options.compression
    numbers = {} if compression is None else compression.numbers
    return {
        "bucket_mb": None if options.bucket_mb == DEFAULT_BUCKET_MB else options.bucket_mb,
        "buckets_in_flight": options.buckets_in_flight,
        "bucket_wait_ms": options.bucket_wait_ms,
        "algorithm": None if algorithm == "auto" else algorithm,
        "mpi_parameters": trial.option("parameters") or None,
        "compression": None if compression is None else compression.method,
        **{f"compression_{name}": value for name, value in numbers.items()},
    }


def bucket_choices(request: TrialRequest, trial: Trial, settings: TuneSettings) -> list[Keys]:
    """Return combinations of bucket size and number in flight that can differ."""
    if not in_buckets(request):
        return []
    model_mb = _model_mb(trial)
    counts = BUCKETS_IN_FLIGHT if settings.buckets_in_flight is None else settings.buckets_in_flight
    if given(request, "buckets_in_flight") is not None or not counts:
        counts = (gradient_options_of(trial).buckets_in_flight or "unbounded",)
    if given(request, "bucket_wait_ms") is not None:
        counts = ("unbounded",)
    found: list[Keys] = []
    for size_mb, count in product(_bucket_sizes(request, trial, settings), counts):
        # a bucket is closed when it has reached its size, which bounds the number of buckets
        most_buckets = 1 if size_mb >= model_mb else math.floor(model_mb / size_mb) + 1
        in_flight = None if count == "unbounded" or count >= most_buckets else count
        found.append({"bucket_mb": size_mb, "buckets_in_flight": in_flight})
    return _different(found, request)


def _bucket_sizes(request: TrialRequest, trial: Trial, settings: TuneSettings) -> list[float]:
    """Return the sizes to try, in MB; of those that hold the whole model one."""
    present, model_mb = gradient_options_of(trial).bucket_mb, _model_mb(trial)
    sizes = BUCKETS_MB if settings.buckets_mb is None else settings.buckets_mb
    if given(request, "bucket_mb") is not None or not sizes:
        return [present]
    # keep the present size if it holds the whole model
    whole_mb = present if present >= model_mb else float(math.ceil(model_mb))
    found = [whole_mb if size == "model" or size >= model_mb else size for size in sizes]
    return list(dict.fromkeys(found))


def _model_mb(trial: Trial) -> float:
    return task_facts(trial.training).parameter_bytes / 2**20


def _different(choices: list[Keys], request: TrialRequest) -> list[Keys]:
    """Return each choice once, without the keys that a trial sets itself."""
    found = [{k: v for k, v in each.items() if given(request, k) is None} for each in choices]
    return [choice for number, choice in enumerate(found) if choice not in found[:number]]


def wait_choices(request: TrialRequest, trial: Trial, settings: TuneSettings) -> list[Keys]:
    """Return combinations of a wait before each message and the largest size of a message."""
    excluding = ("bucket_wait_ms", "buckets_in_flight", "compression")
    is_given = any(given(request, key) is not None for key in excluding)
    if is_given or not in_buckets(request) or request.device != "cpu":
        return []
    waits = BUCKET_WAITS_MS if settings.bucket_waits_ms is None else settings.bucket_waits_ms
    sizes = _bucket_sizes(request, trial, settings)
    found: list[Keys] = [
        {"bucket_mb": size, "bucket_wait_ms": wait, "buckets_in_flight": None}
        for size, wait in product(sizes, waits)
    ]
    return _different(found, request)


def compression_choices(request: TrialRequest, trial: Trial, settings: TuneSettings) -> list[Keys]:
    del trial  # all rounds may compress
    if not compresses(request):
        return []
    if any(given(request, key) is not None for key in ("compression", "bucket_wait_ms")):
        return []
    alone = {"bucket_wait_ms": None} if in_buckets(request) else {}
    return [{"compression": method, **alone} for method in settings.compressions]


def algorithm_choices(request: TrialRequest, trial: Trial, settings: TuneSettings) -> list[Keys]:
    if not accepts(request, "algorithm") or given(request, "algorithm") is not None:
        return []
    if settings.algorithms is not None:
        return [{"algorithm": name} for name in settings.algorithms]
    place = trial.placement
    # hierarchical differs only if several ranks on several nodes reduce together
    is_flat = trial.reduction.among == "ranks"
    levels = is_flat and place.nodes > 1 and place.ranks_per_node > 1
    return [{"algorithm": name} for name in ALGORITHMS if levels or name != "hierarchical"]


def parameter_choices(request: TrialRequest, trial: Trial, settings: TuneSettings) -> list[Keys]:
    if not sends_by_mpirun(request) or given(request, "mpi_parameters"):
        return []
    sets = usual_parameters(trial) if settings.mpi_parameters is None else settings.mpi_parameters
    return [{"mpi_parameters": parameters} for parameters in sets]


def usual_parameters(trial: Trial) -> tuple[dict[str, str], ...]:
    """Return parameters that can affect the communication of this trial; another MPI may lack some.

    There are none on one host if the algorithm is not fixed: ranks then reduce in shared memory,
    without messages.
    """
    one_host = trial.placement.nodes == 1
    if one_host and trial.option("algorithm") in (None, "auto"):
        return ()
    native = _NATIVE if trial.option("algorithm") == "native" else ()
    return (_SHARED_MEMORY if one_host else _TCP) + native


def _round(options: Options) -> Choices:
    def requests(
        searched: Searched, reached: Trial | None, context: SearchContext
    ) -> list[TrialRequest]:
        if reached is None:
            return []
        present = with_communication(searched.request, reached)
        found = options(searched.request, reached, context.settings)
        # another Open MPI may lack some of the parameters that are tried by default
        return [
            changed(present, **keys)
            for keys in found
            if _unknown(keys.get("mpi_parameters"), context) is None
        ]

    return requests


def _searched(context: SearchContext) -> list[Searched]:
    """Return every trial but the baselines.

    Raises EnvironmentLacks if [tune] contains a parameter that this MPI does not know.
    """
    for parameters in context.settings.mpi_parameters or ():
        unknown = _unknown(parameters, context)
        if unknown is not None:
            raise EnvironmentLacks(f"tune.mpi_parameters: {unknown}")
    return [
        Searched(
            target=SearchTarget(workload=workload.name, name=f"trials[{place}]"),
            request=request,
            not_searched=why_left_alone(request),
        )
        for workload in context.short.workloads
        for place, request in enumerate(context.experiment.trials, start=1)
        if applies(request, workload) and not request.is_baseline
    ]


def _filled_in(
    request: TrialRequest, workload: WorkloadRequest, experiment: Experiment, findings: Findings
) -> TrialRequest:
    place = experiment.trials.index(request) + 1
    found = findings.of(SearchTarget(workload=workload.name, name=f"trials[{place}]"))
    if found is None or found.chosen is None or found.chosen == found.default:
        return request
    return with_communication(request, found.chosen)


# Targets are trials of the spec on a workload.
COMM_SEARCH = SearchMethod(
    command="tune comm",
    compares_targets=False,
    rounds={
        "buckets": _round(bucket_choices),
        "waits": _round(wait_choices),
        "compression": _round(compression_choices),
        "algorithm": _round(algorithm_choices),
        "parameters": _round(parameter_choices),
    },
    searched=_searched,
    present=with_communication,
    filled_in=_filled_in,
)
tune_comm = partial(run_search, COMM_SEARCH)


def _unknown(parameters: Mapping[str, str] | None, context: SearchContext) -> str | None:
    """Return which of the parameters this MPI would ignore silently, as text."""
    if not parameters:
        return None
    return unknown_parameters(
        parameters, find_mpirun(context.experiment.settings("mpi", MpiSettings).mpirun).path
    )
