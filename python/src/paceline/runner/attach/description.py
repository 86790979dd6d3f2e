"""The command of the user as a trial, so that everything that reads trials can read its records."""

from __future__ import annotations

import sys
from typing import Any

from paceline.base.errors import UsageError
from paceline.collectives.gloo_group import BACKEND
from paceline.measure.records.layout import TrialFiles
from paceline.plan.spec import load_spec
from paceline.plan.spec.extensions import TRANSPORTS
from paceline.plan.spec.models import SCHEMA, name_of_script
from paceline.plan.spec.values import BASELINE
from paceline.plan.trials.planning import plan_trials
from paceline.plan.trials.trial import Trial
from paceline.runner.attach.place import AttachedRank

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
