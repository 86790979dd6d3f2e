"""A spec of one trial, for benchmarks that start a job script themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tomli_w

from paceline.plan.spec.values import BASELINE

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


def one_trial(
    spec: Path, workload: Mapping[str, Any], trial: Mapping[str, Any], **tables: Mapping[str, Any]
) -> list[str]:
    """Write a spec; return the arguments of a job script that trains its trial.

    tables: further tables, such as [telemetry].
    """
    is_baseline = BASELINE.items() <= trial.items()
    document = {
        "schema": 2,
        "name": "benchmark",
        "repeats": 1,
        "workloads": [workload],
        "trials": [trial] if is_baseline else [BASELINE, trial],
        **tables,
    }
    spec.write_text(tomli_w.dumps(document), encoding="utf-8")
    return [str(spec), "--only", f"*.{trial['launcher']}.*.{trial['local_strategy']}.*"]
