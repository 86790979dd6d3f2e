"""Measurements beside a run that has ended: shares of the batch."""

from __future__ import annotations

import tomllib
import zlib

from paceline.analysis.predict.prediction import ShareMeasurement
from paceline.analysis.trial.reading import load_manifest
from paceline.base.errors import UsageError
from paceline.measure.records.layout import RunFiles
from paceline.plan.spec.loading import Spec, load_spec
from paceline.plan.spec.tables import EVALUATION_KEYS
from paceline.runner.trials.experiment import run
from paceline.runner.trials.planning import Progress
from paceline.runner.trials.run_trial import failure_of_all

SHARE_REPEATS = 3
_SHARE_STEPS, _SHARE_WARMUP = 15, 3
# Keys of a spec that belong to a longer training, or to repeats = "auto".
_LEFT_OUT = ("max_repeats", "tie_margin", "tune", "checkpoint", "failures", "restarts", "baseline")


def run_share(files: RunFiles, wanted: ShareMeasurement, progress: Progress) -> None:
    """Run short trials of configurations on one node with the batch of a node's share.

    They are a run of their own below the run directory. One that was interrupted is continued.
    Raises the errors of `paceline.runner.trials.run`, and RankFailed or TimedOut if a trial fails.
    """
    checksum = zlib.crc32(" ".join(wanted.configurations).encode())
    folder = files.shares / f"{wanted.workload}-b{wanted.global_batch}-{checksum:08x}"
    # a run after a search has the tuned spec
    text = load_manifest(files).get("spec_toml")
    if text is None:
        raise UsageError(f"{files.root}: expected a run of `paceline run`, found no spec in it")
    spec = _share_spec(text, wanted)
    failed = run(
        spec, folder, resume=RunFiles(folder).manifest.exists(), progress=progress, keep_going=True
    )
    if failed:
        raise failure_of_all(failed, RunFiles(folder))


def _share_spec(text: str, wanted: ShareMeasurement) -> Spec:
    """Return the spec of a run with another batch and few steps."""
    document = {k: v for k, v in tomllib.loads(text).items() if k not in _LEFT_OUT}
    document.get("limits", {}).pop("run_s", None)
    lasting = (*EVALUATION_KEYS, "epochs")
    training = {k: v for k, v in document.pop("training", {}).items() if k not in lasting}
    return load_spec(
        {
            **document,
            "repeats": SHARE_REPEATS,
            "only": list(wanted.configurations),
            "training": training,
            "workloads": [
                {k: v for k, v in workload.items() if k not in lasting}
                | {
                    "global_batch": wanted.global_batch,
                    "max_steps": _SHARE_STEPS,
                    "warmup_steps": _SHARE_WARMUP,
                }
                for workload in document["workloads"]
                if workload.get("name") == wanted.workload
            ],
            "trials": [
                {k: v for k, v in trial.items() if k != "workloads"}
                for trial in document["trials"]
                if wanted.workload in trial.get("workloads", [wanted.workload])
                and trial.get("nodes", 1) == 1
            ],
        }
    )
