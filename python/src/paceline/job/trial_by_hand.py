"""The trial that options by hand stand for, by way of a spec, so that there is one set of rules."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import UsageError
from paceline.job.byhand import launching_pid
from paceline.plan.planning import plan_trials
from paceline.plan.trial import trial_name
from paceline.spec.loading import parse_spec

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from paceline.plan.trial import Trial
    from paceline.spec.values import Launcher, LocalStrategy

# option -> where it stands in a spec
_TRAINING = (
    "global_batch", "epochs", "max_steps", "warmup_steps", "image_size", "precision",
    "memory_format", "learning_rate", "momentum", "reading",
)  # fmt: skip
_PLACEMENT = (
    "transport", "reduction", "device", "replicas", "stages", "micro_batches", "schedule",
    "balance", "split_points", "oversubscribe", "bucket_mb", "buckets_in_flight", "algorithm",
    "compression", "compression_rank", "compression_density", "averaging_period",
    "averaging_start",
)  # fmt: skip
TELEMETRY_PATHS = (
    "targets_dir", "textfile_dir", "tls_certificate", "tls_key", "tls_client_ca",
    "basic_auth_file", "bearer_token_file",
)  # fmt: skip
DEFAULT_NAME = "by-hand"
# The first of a table is the only one that a command line can be about.
_PLACE_IN_SPEC = re.compile(r"(trials|workloads)\[1\][.:] ?|training\.")


def trial_by_hand(
    options: argparse.Namespace, launcher: Launcher, nodes: int, ranks_per_node: int | None
) -> Trial:
    """The trial on so many nodes.

    ranks_per_node: None where the local strategy is to say. Raises UsageError with every fault, in
    the words of a spec.
    """
    request = {
        "launcher": launcher,
        "local_strategy": options.local_strategy or _usual_strategy(options, ranks_per_node),
        "nodes": nodes,
        "ranks_per_node": ranks_per_node,
        "threads_per_rank": options.threads_per_rank,
        **{name: getattr(options, name) for name in _PLACEMENT},
    }
    # A spec needs the baseline; a run directory gets it when it is run.
    baseline = {"launcher": "local", "local_strategy": "sequential"}
    is_baseline = all(request[key] == value for key, value in baseline.items())
    trials = [request] if is_baseline else [request, baseline]
    try:
        experiment = parse_spec(_spec_text(options, trials), "options")
        (trial,) = plan_trials(
            experiment.model_copy(update={"trials": experiment.trials[:1]}),
            {options.workload: _absolute(options.data)},
            _node_cores(),
        )
    except UsageError as error:
        raise UsageError(_PLACE_IN_SPEC.sub("", str(error))) from error
    repeat = options.repeat or 0
    if repeat < 0:
        raise UsageError(f"--repeat: expected 0 or more, got {repeat}")
    return trial.model_copy(
        update={"repeat": repeat, "id": trial_name(trial.configuration, repeat)}
    )


def _node_cores() -> int:
    """Cores of this node: those of the launcher, since mpirun may have bound this rank to one."""
    return len(os.sched_getaffinity(launching_pid()))


def _usual_strategy(options: argparse.Namespace, ranks_per_node: int | None) -> LocalStrategy:
    """What is meant where no local strategy is named."""
    if ranks_per_node is not None and ranks_per_node > 1:
        return "processes"
    return "sequential" if options.threads_per_rank in (None, 1) else "intraop"


def _spec_text(options: argparse.Namespace, trials: Sequence[dict[str, Any]]) -> str:
    top = {"schema": 1, "name": options.name or DEFAULT_NAME, "repeats": 1, "seed": options.seed}
    workload = {
        "name": options.workload,
        "data": _absolute(options.data),
        "dropout": False if options.no_dropout else None,
        **{name: getattr(options, name) for name in _TRAINING},
    }
    telemetry = {
        "interval_s": options.telemetry_interval,
        "enabled": False if options.no_sidecar else None,
        "listen_host": options.telemetry_listen_host,
        "listen_port": options.telemetry_listen_port,
        **{name: getattr(options, f"telemetry_{name}") for name in TELEMETRY_PATHS},
    }
    limits = {
        "trial_s": options.trial_timeout,
        "rendezvous_s": options.rendezvous_timeout,
        "collective_s": options.collective_timeout,
    }
    tables = [
        ("", top),
        ("[[workloads]]", workload),
        *(("[[trials]]", trial) for trial in trials),
        ("[telemetry]", telemetry),
        ("[limits]", limits),
        ("[network]", {"interface": options.interface}),
    ]
    return "\n".join(_toml_table(header, values) for header, values in tables)


def _toml_table(header: str, values: dict[str, Any]) -> str:
    # json's strings, numbers and booleans are TOML's, too
    lines = [f"{key} = {json.dumps(value)}" for key, value in values.items() if value is not None]
    return "\n".join([header, *lines])


def _absolute(dataset: str) -> str:
    return dataset if "://" in dataset else str(Path(dataset).resolve())
