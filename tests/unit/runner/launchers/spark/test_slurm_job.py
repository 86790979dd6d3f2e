"""A trial under Spark in a Slurm job, without Spark and without Slurm."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace

from paceline.runner.launchers.base import Command
from paceline.runner.launchers.schedulers.files import limit_s
from paceline.runner.launchers.spark import slurm_job


class Ended:
    """A job that has ended well."""

    returncode = 0

    def poll(self):
        return 0

    def terminate(self):
        pass

    kill = terminate


def test_own_limit_of_the_job_comes_before_that_of_slurm(make_launch_trial, monkeypatch):
    waited_s = []
    launcher = SimpleNamespace(preflight=lambda _trial: None)
    monkeypatch.setattr(slurm_job, "SparkLauncher", lambda: launcher)
    monkeypatch.setattr(slurm_job, "submission", lambda _trial: Command(argv=("spark-submit",)))
    monkeypatch.setattr(slurm_job, "job_script", lambda *_: Path("train.py"))
    start = SimpleNamespace(Popen=lambda *_, **__: Ended(), DEVNULL=subprocess.DEVNULL)
    monkeypatch.setattr(slurm_job, "subprocess", start)
    monkeypatch.setattr(slurm_job, "wait_until", lambda _, limit, **__: waited_s.append(limit))
    trial = make_launch_trial("spark")
    assert slurm_job._submit(trial, {}, []) == 0
    assert waited_s == [limit_s(trial)]
    assert waited_s[0] > trial.limits.trial_s + 60  # the job starts a JVM before its limit begins
