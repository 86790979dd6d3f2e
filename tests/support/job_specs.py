"""Specs of one trial, for job scripts that a test starts by hand."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import tomli_w

from paceline.plan.spec.models import Limits, NetworkSettings, WorkloadRequest
from paceline.plan.spec.values import BASELINE

_TABLES = {"limits": Limits, "network": NetworkSettings}
_OF_EXPERIMENT = ("seed", "telemetry")
NO_SIDECAR = {"enabled": False}


def job_words(folder: Path, launcher: str, **keys: Any) -> list[str]:
    """Write a spec into `folder`; return the arguments `SPEC --only PATTERN` of a job script.

    keys: keys of the spec, whichever table they belong to. Defaults: workload `tiny`, and the local
    strategy that fits `ranks_per_node`.
    """
    several = keys.get("ranks_per_node", 1) != 1
    trial = {"local_strategy": "processes" if several else "sequential", "launcher": launcher}
    workload: dict[str, Any] = {"name": "tiny"}
    document: dict[str, Any] = {"schema": 2, "name": "by-hand", "repeats": 1}
    for key, value in keys.items():
        table = next((name for name, model in _TABLES.items() if key in model.model_fields), None)
        if table is not None:
            document.setdefault(table, {})[key] = value
        elif key in _OF_EXPERIMENT:
            document[key] = value
        else:
            target = workload if key in WorkloadRequest.model_fields else trial
            target[key] = str(value) if key == "data" else value
    is_baseline = BASELINE.items() <= trial.items()
    document |= {"workloads": [workload], "trials": [trial] if is_baseline else [BASELINE, trial]}
    text = tomli_w.dumps(document)
    spec = folder / f"spec-{zlib.crc32(text.encode()):08x}.toml"
    spec.write_text(text, encoding="utf-8")
    return [str(spec), "--only", f"*.{launcher}.*.{trial['local_strategy']}.*"]
