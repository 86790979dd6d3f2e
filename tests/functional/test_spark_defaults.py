"""Trials under Spark train, whatever a site's `spark-defaults.conf` has for its own jobs."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.functional.cli_runs import cli_in, small, trial

# What sites set for long jobs of many executors, and why it can end a trial of two ranks.
DEFAULTS = {
    "spark.excludeOnFailure.enabled": "true",  # refused beside spark.task.maxFailures = 1
    "spark.dynamicAllocation.enabled": "true",  # no barrier stages
    "spark.shuffle.service.enabled": "true",
    "spark.speculation": "true",  # no barrier stages
    "spark.submit.deployMode": "cluster",  # refused with a local master
    "spark.master": "yarn",
    "spark.executor.cores": "1",  # fewer than the threads of a rank
    "spark.executor.memory": "64g",  # more than this machine has
    "spark.executor.pyspark.memory": "256m",  # less address space than torch needs
    "spark.task.maxFailures": "8",
    "spark.task.reaper.enabled": "true",
    "spark.task.resource.gpu.amount": "0.25",  # of GPUs that the executors here do not have
    "spark.executor.resource.gpu.amount": "1",
    "spark.blacklist.enabled": "true",  # the older name
    "spark.python.worker.reuse": "true",
    "spark.python.profile": "true",
    "spark.scheduler.mode": "FAIR",
    "spark.serializer": "org.apache.spark.serializer.KryoSerializer",
    "spark.io.encryption.enabled": "true",
    "spark.network.crypto.enabled": "true",
    "spark.driver.maxResultSize": "1m",  # less than the state of a model
    "spark.driver.memory": "32g",
    "spark.executor.heartbeatInterval": "1s",
    "spark.cores.max": "1",
    "spark.default.parallelism": "400",
    "spark.barrier.sync.timeout": "1",
}


@pytest.mark.parametrize(
    ("transport", "values"), [("gloo", {}), ("spark-rounds", {"averaging_period_steps": 2})]
)
def test_a_trial_trains_with_the_defaults_of_a_site(
    transport: str, values: dict[str, object], cache: Path, tmp_path: Path
) -> None:
    defaults = tmp_path / "conf" / "spark-defaults.conf"
    defaults.parent.mkdir()
    defaults.write_text("".join(f"{name} {value}\n" for name, value in DEFAULTS.items()))
    cli = cli_in(cache, tmp_path)
    cli.environment["SPARK_CONF_DIR"] = str(defaults.parent)
    spec = tmp_path / "spec.toml"
    spec.write_text(small(max_steps=4) + trial("spark", transport, **values))
    ended = cli("run", spec, "--out", tmp_path / "run")
    assert ended.returncode == 0, ended.stderr
