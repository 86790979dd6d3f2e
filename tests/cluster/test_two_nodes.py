"""Local strategies on each of two nodes, under mpirun and under Spark.

The nodes are network namespaces of this machine (paceline.runner.lab) and share its cores. The
tests check that the training is equivalent, not its speed. Here two configurations run under mpirun
and two under Spark; tests/contract/test_strategies.py has all strategies, transports and reductions
with nodes that are processes.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from tests.functional.cli_runs import small
from tests.support.commands import run_command
from tests.support.environment import kept_environment

from paceline.runner.lab import INTERFACE, Lab

pytestmark = [pytest.mark.cluster, pytest.mark.needs("lab"), pytest.mark.timeout(500)]

LIMIT_S = 400.0
SPARK = """
[spark]
master = "{master}"
[spark.conf]
# On a busy machine, executors take longer to start than the launcher waits for them.
"spark.scheduler.maxRegisteredResourcesWaitingTime" = "60s"
"spark.executor.extraJavaOptions" = "{java_options}"
"""
# The strategy of each node, with two replicas or stages.
PROCESSES = 'local_strategy = "processes"\nthreads_per_rank = 1\nranks_per_node = 2'
STRATEGIES = {
    "threads": 'local_strategy = "threads"\nthreads_per_rank = 2\nreplicas = 2',
    "processes": PROCESSES,
    "zero-1 in fp16": (
        f'{PROCESSES}\nreduction = "zero-1"\nprecision = "fp16"\naccumulation_steps = 2'
    ),
    "sharded": PROCESSES.replace("processes", "sharded"),
}


def entries(launcher: str, strategies: dict[str, str]) -> str:
    """Return a [[trials]] entry for each transport and its strategy."""
    return "".join(
        f'[[trials]]\nlauncher = "{launcher}"\ntransport = "{transport}"\nnodes = 2\n'
        f"{STRATEGIES[strategy]}\n"
        for transport, strategy in strategies.items()
    )


@pytest.fixture(scope="module")
def run(
    spark_lab: Lab, tiny_dataset: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[dict[str, object]], Path]:
    """Run all trials; return the rows of the comparison without the baseline, and the folder."""
    folder = tmp_path_factory.mktemp("two-nodes")
    trials = entries("mpi", {"mpi": "zero-1 in fp16", "gloo": "sharded"})
    trials += entries("spark", {"gloo": "threads", "mpi": "processes"})
    limits = {"rendezvous_s": 60, "collective_s": 30}
    spec = small(tiny_dataset, max_steps=6, image_size=64, dropout=True, **limits)
    spec += f'{trials}[network]\ninterface = "{INTERFACE}"\n'
    spec += f'[mpi]\nhostfile = "{spark_lab.hostfile}"\n'
    java_options = os.environ["SPARK_SUBMIT_OPTS"]
    spec += SPARK.format(master=spark_lab.spark_master, java_options=java_options)
    file, out = folder / "spec.toml", folder / "run"
    file.write_text(spec)
    words = [sys.executable, "-m", "paceline.cli", "run", file, "--out", out]
    environment = kept_environment(PACELINE_CACHE=str(folder / "cache"), NO_COLOR="1")
    result = run_command(spark_lab.hosts[0].command(*words), LIMIT_S, env=environment)
    assert result.returncode == 0, result.stdout + result.stderr
    rows = json.loads((out / "comparison.json").read_text())["rows"]
    return [row for row in rows if not row["is_baseline"]], folder


def test_strategies_on_two_nodes_train_the_same(run: tuple[list[dict[str, object]], Path]) -> None:
    rows, folder = run
    assert [row["launcher"] for row in rows].count("spark") == 2
    assert len(rows) == 4
    assert all(row["nodes"] == 2 for row in rows)
    assert {row["configuration"]: row["equivalent"] for row in rows} == {
        row["configuration"]: True for row in rows
    }
    for row in rows:
        traces = folder.glob(f"run/trials/{row['configuration']}.r0/hosts/*/trace.*")
        assert len(list(traces)) == 2, row["configuration"]


def test_barrier_tasks_on_both_hosts_are_one_mpi_job(
    spark_lab: Lab, run: tuple[list[dict[str, object]], Path]
) -> None:
    [trial] = run[1].glob("run/trials/*.spark.mpi.*")
    found = [
        json.loads((trial / "ranks" / str(rank) / "environment.json").read_text())["host"]
        for rank in range(4)
    ]
    names = [host.name for host in spark_lab.hosts]
    assert sorted(found) == [names[0], names[0], names[1], names[1]]
