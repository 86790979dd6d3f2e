"""The command of the user as a trial, so that everything that reads trials can read its records.

The variables of its launcher say which rank a process is.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.base.errors import EnvironmentLacks, UsageError
from paceline.collectives.gloo_group import BACKEND
from paceline.measure.records.layout import TrialFiles
from paceline.plan.spec import load_spec
from paceline.plan.spec.extensions import TRANSPORTS
from paceline.plan.spec.models import SCHEMA, name_of_script
from paceline.plan.spec.values import BASELINE
from paceline.plan.trials.planning import plan_trials
from paceline.plan.trials.trial import Trial

_GLOO = "gloo"
# The transport of a back end of torch.distributed that has another name.
_OTHER_NAMES = {BACKEND: _GLOO, "mpi4py": "mpi"}
_OF_CUDA = "nccl"  # where a group has a back end for each device; that of the CPU is gloo


def planned_trial(files: TrialFiles, place: AttachedRank, cores: int) -> Trial:
    """Return this process's script as a trial, before its training begins.

    Transport, device and threads are guesses; `trial_as_found` corrects them. cores: that its ranks
    may use.
    """
    script = getattr(sys.modules["__main__"], "__file__", None) or sys.argv[0] or "script"
    if place.ranks > 1:
        layout = {"local_strategy": "processes", "ranks_per_node": place.ranks, "transport": _GLOO}
    else:
        layout = {"local_strategy": "intraop"}
    own = {"launcher": place.launcher, "threads_per_rank": 1, "oversubscribe": True, **layout}
    spec: dict[str, Any] = {
        "schema": SCHEMA,
        "name": name_of_script(script),
        "repeats": 1,
        "workloads": [{"script": script, "arguments": sys.argv[1:]}],
        "trials": [dict(BASELINE), own],
    }
    planned = plan_trials(load_spec(spec).experiment, {}, cores)
    [trial] = [each for each in planned if not each.is_baseline]
    placement = trial.placement.model_copy(update={"allocated_cores": cores})
    return trial.model_copy(update={"id": files.root.name, "placement": placement})


def trial_as_found(trial: Trial, *, backend: str | None, device: str, threads: int) -> Trial:
    """Return the trial with what is known when its first gradient is complete.

    backend: of the script's default process group; None without one. threads: of each rank.
    Raises UsageError for a back end that Paceline does not know.
    """
    found: dict[str, Any] = {
        "device": device,
        "placement": trial.placement.model_copy(update={"threads_per_rank": threads}),
    }
    if backend is not None and trial.placement.ranks > 1:
        transport = _transport(backend, device)
        found["transport"] = transport
        found["transport_options"] = TRANSPORTS.get(transport).Options()
    return trial.model_copy(update=found)


def _transport(backend: str, device: str) -> str:
    if backend in _OTHER_NAMES:
        return _OTHER_NAMES[backend]
    if backend in {each.name for each in TRANSPORTS.all()}:
        return backend
    if backend in ("undefined", "custom") or ":" in backend:
        return _GLOO if device == "cpu" else _OF_CUDA
    raise UsageError(
        f"expected a process group of gloo, mpi4py, nccl, got {backend}; the run says gloo"
    )


# rank, number of ranks, number of ranks on this host
_VARIABLES = (
    ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),  # torchrun, and scripts in its style
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),  # Open MPI
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),  # MPICH
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachedRank:
    """A rank among the ranks of a command."""

    launcher: str
    rank: int
    ranks: int


def own_place(environment: Mapping[str, str] = os.environ) -> AttachedRank:
    """Return the place of this process; rank 0 of 1 if no launcher has given it one.

    Raises EnvironmentLacks if the ranks are on several hosts.
    """
    for rank, ranks, local_ranks in _VARIABLES:
        if rank not in environment or ranks not in environment:
            continue
        count, here = int(environment[ranks]), int(environment.get(local_ranks, environment[ranks]))
        if here != count:
            raise EnvironmentLacks(
                f"expected all ranks on this host, found {here} of {count}; use `paceline run` "
                "for several hosts"
            )
        return AttachedRank(
            launcher=_launcher(environment), rank=int(environment[rank]), ranks=count
        )
    return AttachedRank(launcher="local", rank=0, ranks=1)


def _launcher(environment: Mapping[str, str]) -> str:
    if "TORCHELASTIC_RUN_ID" in environment:
        return "torchrun"
    is_mpi = "OMPI_COMM_WORLD_SIZE" in environment or "PMI_SIZE" in environment
    return "mpi" if is_mpi else "local"
