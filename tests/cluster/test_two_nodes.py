"""Every local strategy inside each of two nodes, under mpirun and under Spark.

The nodes are network namespaces of this machine (see hosts.py), so they share its cores: what is
shown is that the training is the same, not how fast it is.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from tests.cluster.hosts import INTERFACE, hosts, why_not, write_agent

from paceline.data.catalogue import ensure_dataset
from paceline.launch.tools import find_java, find_spark

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.cluster.hosts import Host

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

LIMIT_S = 300.0
SPEC = """
schema = 1
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
# What each node does; two replicas or stages on each.
STRATEGIES = {
    "threads": "threads_per_rank = 2\nreplicas = 2",
    "processes": "threads_per_rank = 1\nranks_per_node = 2",
    "pipeline": "threads_per_rank = 1\nstages = 2\nmicro_batches = 4",
    "hybrid": "threads_per_rank = 1\nreplicas = 2\nstages = 2\nmicro_batches = 2\n"
    "oversubscribe = true",
}


@pytest.fixture(scope="module")
def two_hosts() -> Iterator[list[Host]]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with hosts(2) as made:
        yield made


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ensure_dataset("tiny", images=48, seed=1, cache_dir=tmp_path_factory.mktemp("data"))


def entries(launcher: str, transport: str, strategies: dict[str, str]) -> str:
    head = f'[[trials]]\nlauncher = "{launcher}"\ntransport = "{transport}"\nnodes = 2\n'
    return "\n".join(
        f'{head}local_strategy = "{name}"\n{values}\n' for name, values in strategies.items()
    )


def environment_of(cache: Path) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PACELINE_", "OMP_"))}
    return {**kept, "PACELINE_CACHE": str(cache), "NO_COLOR": "1"}


def spark_name(host: Host) -> dict[str, str]:
    """Spark looks its host's name up, which nobody here resolves; so it is told the address."""
    return {"SPARK_LOCAL_HOSTNAME": host.address}


def rows_of_run(host: Host, spec: str, folder: Path) -> list[dict[str, object]]:
    """The comparison's rows but the baseline's, of `paceline run` on `host`."""
    file, out = folder / "spec.toml", folder / "run"
    file.write_text(spec)
    result = subprocess.run(
        host.command(sys.executable, "-m", "paceline.cli", "run", file, "--out", out),
        env={**environment_of(folder / "cache"), **spark_name(host)},
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
    assert {row["configuration"]: row["identical"] for row in rows} == {
        row["configuration"]: True for row in rows
    }
    for row in rows:
        traces = folder.glob(f"run/trials/{row['configuration']}.r0/hosts/*/trace.jsonl")
        assert len(list(traces)) == 2, row["configuration"]


@pytest.mark.parametrize("transport", ["mpi", "gloo"])
def test_every_strategy_on_two_nodes_under_mpirun(
    two_hosts: list[Host], dataset: Path, tmp_path: Path, transport: str
) -> None:
    agent = write_agent(two_hosts, tmp_path / "agent.sh")
    hostfile = tmp_path / "hosts"
    hostfile.write_text("".join(f"{host.address} slots=2\n" for host in two_hosts))
    trials = entries("mpi", transport, STRATEGIES)
    if transport == "gloo":
        flat = STRATEGIES["processes"] + '\nreduction = "flat"'
        trials += entries("mpi", transport, {"processes": flat})
    spec = SPEC.format(data=dataset, interface=INTERFACE, trials=trials)
    mpi = f'[mpi]\nhostfile = "{hostfile}"\narguments = ["--prtemca", "plm_ssh_agent", "{agent}"]\n'
    rows = rows_of_run(two_hosts[0], spec + mpi, tmp_path)
    assert len(rows) == (5 if transport == "gloo" else 4)
    assert_same_training_on_two_nodes(rows, tmp_path)


def test_strategies_on_two_nodes_under_spark(
    two_hosts: list[Host], dataset: Path, tmp_path: Path
) -> None:
    chosen = {name: STRATEGIES[name] for name in ("threads", "pipeline")}
    spec = SPEC.format(data=dataset, interface=INTERFACE, trials=entries("spark", "gloo", chosen))
    with standalone_cluster(two_hosts, tmp_path) as master:
        spark = f'[spark]\nmaster = "{master}"\n[spark.conf]\n'
        spark += f'"spark.driver.host" = "{two_hosts[0].address}"\n'
        rows = rows_of_run(two_hosts[0], spec + spark, tmp_path)
    assert len(rows) == len(chosen)
    assert_same_training_on_two_nodes(rows, tmp_path)


@contextmanager
def standalone_cluster(made: list[Host], work: Path) -> Iterator[str]:
    """A Spark master on the first host and a worker of two cores on each."""
    environment = {
        **environment_of(work / "cache"),
        "JAVA_HOME": str(find_java().path.parent.parent),
        "PYSPARK_PYTHON": sys.executable,
    }
    classes = find_spark().path / "bin" / "spark-class"
    deploy = "org.apache.spark.deploy"
    first = made[0]
    master = f"spark://{first.address}:7077"
    commands = [(first, ["master.Master", "--port", "7077"])]
    worker = ["worker.Worker", "--cores", "2", "--memory", "1g", "--work-dir"]
    commands += [(host, [*worker, str(work / host.name), master]) for host in made]
    log = work / "daemons.log"
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        with log.open("ab") as output:
            for host, (name, *options) in commands:
                where = ["--host", host.address, "--webui-port", "0"]
                daemons.append(
                    subprocess.Popen(
                        host.command(classes, f"{deploy}.{name}", *where, *options),
                        env={**environment, **spark_name(host)},
                        stdout=output,
                        stderr=output,
                    )
                )
        deadline = time.monotonic() + 60
        while log.read_text().count("Successfully registered with master") < len(made):
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield master
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            daemon.wait(timeout=30)
