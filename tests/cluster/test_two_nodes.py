"""Local strategies on each of two nodes, under mpirun and under Spark.

The nodes are network namespaces of this machine (paceline.lab) and share its cores. The tests check
that the training is equivalent, not its speed. Here two configurations run under mpirun and two
under Spark; tests/contract/test_strategies.py has all strategies, transports and reductions with
nodes that are processes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from tests.environment import is_kept

from paceline.lab import INTERFACE

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.lab import Host, Lab

pytestmark = [pytest.mark.cluster, pytest.mark.needs("lab"), pytest.mark.timeout(400)]

LIMIT_S = 300.0
SPEC = """
schema = 2
name = "two-nodes"
seed = 3
repeats = 1
[training]
max_steps = 6
epochs = 8
warmup_steps = 1
global_batch = 16
image_size = 64
[[workloads]]
name = "tiny"
data = "{data}"
[[trials]]
launcher = "local"
local_strategy = "sequential"
{trials}
[telemetry]
interval_s = 0.25
[network]
interface = "{interface}"
[limits]
trial_s = 100
rendezvous_s = 60
collective_s = 30
"""
SPARK = """
[spark]
master = "{master}"
[spark.conf]
# On a busy machine, executors take longer to start than the launcher waits for them.
"spark.scheduler.maxRegisteredResourcesWaitingTime" = "60s"
"spark.executor.extraJavaOptions" = "{java_options}"
"""
# The strategy of each node, with two replicas or stages.
STRATEGIES = {
    "threads": "threads_per_rank = 2\nreplicas = 2",
    "processes": "threads_per_rank = 1\nranks_per_node = 2",
    "pipeline": "threads_per_rank = 1\nstages = 2\nmicro_batches = 4",
}


def entries(launcher: str, strategies: dict[str, str]) -> str:
    """Return a [[trials]] entry for each transport and its strategy."""
    return "".join(
        f'[[trials]]\nlauncher = "{launcher}"\ntransport = "{transport}"\nnodes = 2\n'
        f'local_strategy = "{strategy}"\n{STRATEGIES[strategy]}\n'
        for transport, strategy in strategies.items()
    )


def environment_of(cache: Path) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if is_kept(k)}
    return {**kept, "PACELINE_CACHE": str(cache), "NO_COLOR": "1"}


def rows_of_run(host: Host, spec: str, folder: Path) -> list[dict[str, object]]:
    """Run a spec on `host`; return the rows of its comparison without the baseline."""
    file, out = folder / "spec.toml", folder / "run"
    file.write_text(spec)
    result = subprocess.run(
        host.command(sys.executable, "-m", "paceline.cli", "run", file, "--out", out),
        env=environment_of(folder / "cache"),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    rows = json.loads((out / "comparison.json").read_text())["rows"]
    return [row for row in rows if not row["is_baseline"]]


def assert_same_training_on_two_nodes(rows: list[dict[str, object]], folder: Path) -> None:
    assert all(row["nodes"] == 2 for row in rows)
    assert {row["configuration"]: row["equivalent"] for row in rows} == {
        row["configuration"]: True for row in rows
    }
    for row in rows:
        traces = folder.glob(f"run/trials/{row['configuration']}.r0/hosts/*/trace.*")
        assert len(list(traces)) == 2, row["configuration"]


def test_strategies_on_two_nodes_under_mpirun(lab: Lab, tiny_dataset: Path, tmp_path: Path) -> None:
    trials = entries("mpi", {"mpi": "processes", "gloo": "pipeline"})
    spec = SPEC.format(data=tiny_dataset, interface=INTERFACE, trials=trials)
    mpi = f'[mpi]\nhostfile = "{lab.hostfile}"\n'
    rows = rows_of_run(lab.hosts[0], spec + mpi, tmp_path)
    assert len(rows) == 2
    assert_same_training_on_two_nodes(rows, tmp_path)


def test_strategies_on_two_nodes_under_spark(
    spark_lab: Lab, tiny_dataset: Path, tmp_path: Path
) -> None:
    trials = entries("spark", {"gloo": "threads", "mpi": "processes"})
    spec = SPEC.format(data=tiny_dataset, interface=INTERFACE, trials=trials)
    java_options = os.environ["SPARK_SUBMIT_OPTS"]
    spark = SPARK.format(master=spark_lab.spark_master, java_options=java_options)
    rows = rows_of_run(spark_lab.hosts[0], spec + spark, tmp_path)
    assert len(rows) == 2
    assert_same_training_on_two_nodes(rows, tmp_path)
    # the barrier tasks on both hosts are one MPI job
    [trial] = tmp_path.glob("run/trials/*.spark.mpi.*")
    found = [
        json.loads((trial / "ranks" / str(rank) / "environment.json").read_text())["host"]
        for rank in range(4)
    ]
    names = [host.name for host in spark_lab.hosts]
    assert sorted(found) == [names[0], names[0], names[1], names[1]]
