"""`paceline lab …` from up to down, with Spark and MPI in it."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cluster.lab.labs import removing_remains, traces_of
from tests.functional.cli_runs import Cli
from tests.support.commands import run_command

from paceline.analysis.trial.reading import load_run
from paceline.measure.records.layout import RunFiles
from paceline.runner.lab.record import Registry

pytestmark = [pytest.mark.cluster, pytest.mark.needs("lab")]

LIMIT_S = 150
MPIRUN = Path(sys.executable).with_name("mpirun")
# Of 1,650 calls of mpirun 5.0.11 for `hostname` alone, at least 3 did not end, of 2,400 calls with
# a rank that lasts, none.
NAME = "hostname && sleep 0.5"
CONNECT = "import socket; socket.create_connection(('10.77.0.1', 7077), 5)"


def lab(*words: object) -> subprocess.CompletedProcess[str]:
    with removing_remains():
        return run_command([sys.executable, "-m", "paceline.cli", "lab", *words], LIMIT_S)


def lab_here(*words: object) -> subprocess.CompletedProcess[str]:
    """Run a command in this process, which saves the imports. For those that start no program."""
    with removing_remains():
        return Cli(dict(os.environ), Path.cwd()).main("lab", *map(str, words))


@pytest.fixture
def name() -> Iterator[str]:
    made = f"test-{secrets.token_hex(3)}"
    yield made
    lab_here("down", "--name", made)


def test_lab_stays_up_with_spark_and_mpi_until_it_is_taken_down(name: str, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    up = lab("up", "--name", name, "--slots", 1, "--bandwidth", "1gbit", "--logs", logs)
    assert up.returncode == 0, up.stderr
    assert "spark://10.77.0.1:7077" in up.stdout
    record = Registry().load(name)
    assert record is not None

    assert len(record.hosts) == 2
    assert "up already" in lab_here("up", "--name", name).stderr

    for worker in ("worker-0.log", "worker-1.log"):
        assert "Successfully registered with master" in (logs / worker).read_text()
    connected = lab("exec", "--name", name, 1, "--", sys.executable, "-c", CONNECT)
    assert connected.returncode == 0, connected.stderr

    ranks = lab("exec", "--name", name, f"{name}-0", MPIRUN, "--hostfile", record.hostfile,
                "-n", 2, "--bind-to", "none", "sh", "-c", NAME)  # fmt: skip
    assert sorted(ranks.stdout.split()) == [f"{name}-0", f"{name}-1"], ranks.stderr

    assert lab_here("cut", "--name", name, 0).returncode == 0
    lost = lab("exec", "--name", name, 1, sys.executable, "-c", CONNECT)
    assert lost.returncode == 1
    assert lab_here("restore", "--name", name, 0).returncode == 0

    down = lab_here("down", "--name", name)
    # a lab that test_crash.py has killed may be named before
    assert (down.returncode, down.stderr.splitlines()[-1]) == (0, f"lab {name} is removed")
    assert traces_of(record) == []
    assert (logs / "worker-0.log").exists(), "logs that were asked for stay"
    again = lab_here("down", "--name", name)
    assert again.returncode == 0
    assert f"there is no lab {name}" in again.stderr


def test_up_with_a_command_ends_as_the_command_does(name: str) -> None:
    line = 'test "$(hostname)" = "$PACELINE_LAB-0" && echo "on  $PACELINE_LAB_HOSTS" && exit 7'
    done = lab("up", "--name", name, "--no-spark", "--exec", line)
    assert (done.returncode, done.stdout) == (7, "on  10.77.0.1,10.77.0.2\n"), done.stderr
    assert Registry().load(name) is None
    assert not Path(f"/run/netns/paceline-{name}-0").exists()


STUDY = """
schema = 2
name = "study"
measure_again = false
repeats = 1
[training]
max_steps = 3
warmup_steps = 1
[[workloads]]
name = "tiny"
[[trials]]
launcher = "local"
local_strategy = "sequential"
[[trials]]
launcher = "mpi"
transport = "gloo"
local_strategy = "sequential"
nodes = 2
[[trials]]
launcher = "mpi"
transport = "gloo"
local_strategy = "sequential"
nodes = 2
link = "100mbit"
[network]
interface = "ethernet"  # the lab has another
"""


def test_experiment_runs_on_hosts_made_for_it_with_the_links_of_its_trials(
    name: str, tmp_path: Path
) -> None:
    spec, run = tmp_path / "study.toml", tmp_path / "run"
    spec.write_text(STUDY)
    done = lab("run", spec, "--name", name, "--cores", 1, "--out", run, "-q")
    assert done.returncode == 0, done.stdout + done.stderr
    assert Registry().load(name) is None
    records = load_run(RunFiles(run))
    assert [record.link for record in records] == [None, "1gbit", "100mbit"]
    assert {rank.status.host for rank in records[2].ranks} == {f"{name}-0", f"{name}-1"}


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["up", "--hosts", "0"], "expected 1 to 64, got 0"),
        (["up", "--bandwidth", "fast"], "got 'fast'"),
        (["up", "--name", "no.dots"], "got 'no.dots'"),
        (["cut", "--name", "nobody", "0"], "there are:"),
    ],
)
def test_what_cannot_be_is_refused_without_a_stack_trace(words: list[str], complaint: str) -> None:
    done = lab_here(*words)
    assert done.returncode == 2
    assert complaint in done.stderr
    assert "Traceback" not in done.stderr


def test_name_of_this_machine_is_what_it_was(name: str) -> None:
    before = socket.gethostname()
    lab("up", "--name", name, "--no-spark", "--exec", "true")
    assert Path("/proc/sys/kernel/hostname").read_text().strip() == before
