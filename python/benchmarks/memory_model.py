"""Predicted and measured peak memory of workloads and local strategies on this machine.

    python memory_model.py --out results/memory.json [--only PATTERN …]

Each case trains for four steps, as the probes of `paceline tune batch` do, without a memory limit.
Patterns are parts of "workload strategy", for example `cifar` or `hogwild`. Other processes may use
the CPU meanwhile, but the machine must have the memory that the largest case needs (about 3 GiB).
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import write_results
from paceline.data.catalogue import ensure_dataset
from paceline.host.machine import default_cache_dir
from paceline.plan.planning import plan_trials
from paceline.records.files import read_json
from paceline.records.layout import TrialFiles
from paceline.runner.run_trial import run_trial
from paceline.spec.loading import check_spec
from paceline.spec.own_task import reads_dataset
from paceline.tune.batch.prediction import MIB, predict_memory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.plan.trial import Trial

SEQUENTIAL = {"launcher": "local", "local_strategy": "sequential"}
_TWO = {"launcher": "local", "ranks_per_node": 2, "oversubscribe": True}
_PIPELINE = {
    "launcher": "local", "local_strategy": "pipeline", "stages": 2, "balance": "size",
    "oversubscribe": True,
}  # fmt: skip
_CHECKPOINTED = {"activation_checkpointing": True}
STRATEGIES: dict[str, dict[str, Any]] = {
    "sequential": SEQUENTIAL,
    "sequential, checkpointed": SEQUENTIAL | _CHECKPOINTED,
    "threads": {
        "launcher": "local", "local_strategy": "threads", "replicas": 2, "oversubscribe": True,
    },
    "processes": _TWO | {"local_strategy": "processes"},
    "processes, checkpointed": _TWO | {"local_strategy": "processes"} | _CHECKPOINTED,
    "processes, gloo": _TWO | {"local_strategy": "processes", "transport": "gloo"},
    "pipeline": _PIPELINE,
    "pipeline, checkpointed": _PIPELINE | _CHECKPOINTED,
    "pipedream": _PIPELINE | {"schedule": "pipedream"},
    "parameter-server, asynchronous": _TWO
    | {"local_strategy": "parameter-server", "update_mode": "asynchronous"},
    "hogwild": _TWO | {"local_strategy": "hogwild"},
}  # fmt: skip
# workload -> (samples of the data set, global batch, strategies)
WORKLOADS: dict[str, tuple[int, int, tuple[str, ...]]] = {
    "tiny": (96, 32, ("sequential", "processes")),
    "cifar-cnn": (
        512, 512,
        ("sequential", "processes", "parameter-server, asynchronous", "hogwild", "pipedream"),
    ),
    "simple-big": (320, 64, tuple(STRATEGIES)),
    "gpt-small": (64, 16, ("sequential", "processes")),
}  # fmt: skip


def planned(workload: str, strategy: str) -> Trial:
    """Return a trial of four steps."""
    samples, batch, _ = WORKLOADS[workload]
    request = STRATEGIES[strategy]
    document = {
        "schema": 2,
        "name": "memory-model",
        "repeats": 1,
        "training": {"max_steps": 4, "epochs": 4, "warmup_steps": 1, "global_batch": batch},
        "workloads": [{"name": workload, "samples": samples}],
        "trials": [request] if request == SEQUENTIAL else [SEQUENTIAL, request],
        "telemetry": {"enabled": False},
    }
    experiment = check_spec(document, "memory-model")
    datasets = {}
    if reads_dataset(experiment.workloads[0]):
        cache = default_cache_dir()
        path = ensure_dataset(workload, images=samples, seed=experiment.seed, cache_dir=cache)
        datasets[workload] = str(path)
    trials = plan_trials(experiment, datasets, cores=2)
    checkpointed = bool(request.get("activation_checkpointing"))
    wanted = next(
        trial
        for trial in trials
        if trial.local_strategy == request["local_strategy"]
        and trial.training.activation_checkpointing is checkpointed
    )
    return wanted.model_copy(update={"save_tensors": False})


def measured(trial: Trial) -> list[dict[str, int]]:
    """Run the trial; return private and shared bytes of each rank."""
    with tempfile.TemporaryDirectory() as folder:
        files = TrialFiles(Path(folder) / "trial")
        outcome = run_trial(trial, files)
        if outcome.status != "ok":
            raise SystemExit(f"{trial.configuration}: {outcome.message}")
        return [read_json(rank.memory) for _, rank in files.ranks()]


def case(workload: str, strategy: str) -> dict[str, Any]:
    trial = planned(workload, strategy)
    [predicted] = predict_memory(trial, [trial.training.global_batch])
    ranks = measured(trial)
    total = sum(rank["peak_private_bytes"] + rank["shared_bytes"] for rank in ranks)
    found = {
        "workload": workload,
        "global_batch": trial.training.global_batch,
        "strategy": strategy,
        "predicted_mib": round(predicted.total / MIB),
        "measured_mib": round(total / MIB),
        "ratio": round(predicted.total / total, 3),
        "ranks": ranks,
    }
    print(*(found[key] for key in list(found)[:-1]), sep="  ", flush=True)
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=[""], metavar="PATTERN")
    arguments = parser.parse_args(argv)
    names = [
        (workload, strategy)
        for workload, (*_, strategies) in WORKLOADS.items()
        for strategy in strategies
        if any(pattern in f"{workload} {strategy}" for pattern in arguments.only)
    ]
    write_results(arguments.out, "memory_model", {"cases": [case(*name) for name in names]})


if __name__ == "__main__":
    main()
