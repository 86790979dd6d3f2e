"""Two nodes of which the second does not see the run directory, with S3 as the place of the run.

The nodes are hosts of a lab. On the second one, an empty file system covers the folder of the runs.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.lab.labs import checked_lab, hide
from tests.functional.cli_runs import small
from tests.support.commands import run_command
from tests.support.environment import kept_environment
from tests.support.s3 import BUCKET, KEY

from paceline.base.errors import ExitCode
from paceline.measure.records.documents import read_statuses
from paceline.measure.records.layout import RunFiles, TrialFiles
from paceline.runner.lab import INTERFACE, Host, Lab, LabSettings
from paceline.runner.lab.session import boot, crash

pytestmark = [pytest.mark.cluster, pytest.mark.needs("lab"), pytest.mark.timeout(400)]

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 300.0
PORT = 5000
# With keys in variables, Spark resolves its own host name, which hosts of a lab cannot.
KEY_VARIABLE = "AWS_SHARED_CREDENTIALS_FILE"
FAULTY = Path(__file__).with_name("programs") / "faulty_on_host.py"
STEPS = 70  # more than 64, so that steps are replayed from states of the baseline
MPI = """
[[trials]]
launcher = "mpi"
local_strategy = "processes"
nodes = 2
ranks_per_node = 2
threads_per_rank = 1
oversubscribe = true
"""
SPARK = """
[[trials]]
launcher = "spark"
transport = "gloo"
local_strategy = "sequential"
nodes = 2
"""
PLACES = """
[network]
interface = "{interface}"
[mpi]
hostfile = "{hostfile}"
[spark]
master = "{master}"
[spark.conf]
# On a busy machine, executors take longer to start than the launcher waits for them.
"spark.scheduler.maxRegisteredResourcesWaitingTime" = "60s"
"spark.executor.extraJavaOptions" = "{java_options}"
"spark.executorEnv.{key_variable}" = "{key_file}"
"""
NAMES = "import sys; from paceline.train.data.location import location_of as at; "
NAMES += "print(*at(sys.argv[1]).names())"


@dataclass(frozen=True, slots=True)
class Site:
    """The hosts, and a folder whose `runs` only the first one sees."""

    lab: Lab
    folder: Path

    def url(self, name: str) -> str:
        place = f"{self.lab.hosts[0].address}:{PORT}"
        return f"s3://{BUCKET}/{name}?endpoint_override={place}&scheme=http"

    @property
    def key_file(self) -> Path:
        return self.folder / "credentials"

    def python(self, *words: object) -> subprocess.CompletedProcess[str]:
        """Run Python on the first host."""
        environment = kept_environment(
            PACELINE_CACHE=str(self.folder / "cache"),
            NO_COLOR="1",
            **{KEY_VARIABLE: str(self.key_file)},
        )
        command = self.lab.hosts[0].command(sys.executable, *words)
        return run_command(command, LIMIT_S, env=environment, cwd=self.folder)

    def run(self, spec: str, out: str) -> subprocess.CompletedProcess[str]:
        places = PLACES.format(
            interface=INTERFACE,
            hostfile=self.lab.hostfile,
            master=self.lab.spark_master,
            java_options=os.environ["SPARK_SUBMIT_OPTS"],
            key_variable=KEY_VARIABLE,
            key_file=self.key_file,
        )
        path = self.folder / "spec.toml"
        path.write_text(spec + places, "utf-8")
        return self.python("-m", "paceline.cli", "run", path, "--out", out)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("unshared")
    settings = LabSettings(hosts=2, slots=2, spark=True)
    with checked_lab(settings, folder / "logs") as lab:
        (folder / "runs").mkdir()
        hide(folder / "runs", lab.hosts[1])
        crash(lab.record, lab.hosts[1])  # and start its Spark worker again
        boot(lab.record, lab.hosts[1])
        with s3_on(lab.hosts[0]):
            site = Site(lab, folder)
            keys = f"aws_access_key_id = {KEY}\naws_secret_access_key = {KEY}\n"
            site.key_file.write_text(f"[default]\n{keys}", "utf-8")
            yield site


@contextmanager
def s3_on(host: Host) -> Iterator[None]:
    command = host.command(sys.executable, "-m", "tests.support.s3", host.address, PORT)
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield
        process.stdin.close()


def spec_of(data: Path, trials: str, max_steps: int, options: str = "") -> str:
    """Return a spec with a baseline and other trials; options: of a task with a fault."""
    limits = {"rendezvous_s": 60, "collective_s": 30}
    size = {"max_steps": max_steps, "epochs": max_steps, "image_size": 32}
    text = small(data, dropout=True, **size, **limits) + trials
    task = f'name = "faulty"\ntask = "{FAULTY}:Faulty"\noptions = {{ {options} }}'
    return text.replace('name = "tiny"', task) if options else text


def trial_of(run: Path, launcher: str) -> TrialFiles:
    [(_, files)] = [each for each in RunFiles(run).trials() if f".{launcher}." in each[0]]
    return files


def outcome_of(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(trial_of(run, "mpi").outcome.read_text("utf-8"))
    return found


def copied_run(site: Site, ended: subprocess.CompletedProcess[str]) -> Path:
    """Return the run directory of a command with a URL."""
    [name] = re.findall(r"the run is in (\S+) and in s3:", ended.stderr)
    return site.folder / name


@pytest.fixture(scope="module")
def good(site: Site, tiny_dataset: Path) -> Path:
    """Run a trial under mpirun and one under Spark; return the run directory."""
    ended = site.run(spec_of(tiny_dataset, MPI + SPARK, STEPS), site.url("good"))
    logs = "\n".join(file.read_text() for file in site.folder.glob("runs/*/trials/*/launcher.log"))
    assert ended.returncode == 0, ended.stdout + ended.stderr + logs
    return copied_run(site, ended)


@pytest.mark.parametrize(("launcher", "ranks"), [("mpi", 4), ("spark", 2)])
def test_records_of_both_nodes_are_complete(
    site: Site, good: Path, launcher: str, ranks: int
) -> None:
    files = trial_of(good, launcher)
    statuses = read_statuses(files)
    names = {host.name for host in site.lab.hosts}
    assert [status.state for status in statuses] == ["done"] * ranks
    assert {status.host for status in statuses} == names
    assert {name for name, _ in files.hosts()} == names
    for _, host in files.hosts():
        assert len(list(host.root.glob("trace.*"))) == 1
        assert json.loads(host.sidecar.read_text())["ended"] is not None
    for _, rank in files.ranks():
        assert "is done" in rank.log.read_text()
        assert len(list(rank.root.glob("steps.*"))) == 1
    if launcher == "mpi":  # under Spark it is in the log of the executor
        expected = f"host {site.lab.hosts[1].name} does not see"
        assert expected in files.launcher_log.read_text()


def test_trials_are_equivalent_also_where_steps_are_replayed(good: Path) -> None:
    rows = json.loads((good / "comparison.json").read_text())["rows"]
    found = {row["launcher"]: row["equivalent"] for row in rows if not row["is_baseline"]}
    assert found == {"mpi": True, "spark": True}
    for launcher in found:
        result = json.loads(trial_of(good, launcher).result.read_text())
        assert result["replayed"]["missing"] == {}


def test_commands_read_the_run(site: Site, good: Path) -> None:
    for command in ("compare", "report"):
        ended = site.python("-m", "paceline.cli", command, good)
        assert ended.returncode == 0, ended.stderr


def test_nothing_is_left_on_the_node_or_at_the_place(site: Site, good: Path) -> None:
    assert list(site.lab.hosts[1].temporary.glob("paceline-*")) == []
    listed = site.python("-c", NAMES, site.url("good"))
    assert "manifest.json" in listed.stdout.split()
    assert "nodes" not in listed.stdout.split()


@pytest.mark.parametrize(
    ("transport", "fault", "message"),
    [
        ("gloo", "error", "failed: ValueError: planted on this host"),
        ("gloo", "killed", r"was killed by SIGKILL \(signal 9\)"),
        ("mpi", "killed", r"was killed (by SIGKILL \(signal 9\)|or crashed)"),
    ],
)
def test_failure_of_a_rank_on_the_node_is_explained(
    site: Site, tiny_dataset: Path, transport: str, fault: str, message: str
) -> None:
    host = site.lab.hosts[1].name
    options = f'host = "{host}", fault = "{fault}"'
    ended = site.run(
        spec_of(tiny_dataset, f'{MPI}transport = "{transport}"\n', 6, options),
        site.url(f"{fault}-{transport}"),
    )
    run = copied_run(site, ended)
    outcome = outcome_of(run)
    assert ended.returncode == outcome["exit_code"] == ExitCode.RANK_FAILED, ended.stderr
    assert outcome["failed_rank"] in (2, 3)
    assert re.search(rf"rank [23] of 4 \(host {host}, pid \d+\) {message}", outcome["message"])
    files = trial_of(run, "mpi")
    assert [number for number, _ in files.ranks()] == [0, 1, 2, 3]
    steps = {n: len(files.rank(n).steps.read_text().splitlines()) for n in (2, 3)}
    assert steps.pop(outcome["failed_rank"]) == 3
    # Its failure may end the other rank of the node before that has written the third step.
    assert set(steps.values()) <= {2, 3}


def test_run_without_a_place_is_refused_with_both_ways_out(site: Site, tiny_dataset: Path) -> None:
    ended = site.run(spec_of(tiny_dataset, MPI, 6), "runs/without-place")
    outcome = outcome_of(site.folder / "runs/without-place")
    assert ended.returncode == outcome["exit_code"] == ExitCode.ENVIRONMENT, ended.stderr
    assert f"host {site.lab.hosts[1].name}: expected {site.folder}/runs/" in outcome["message"]
    assert "must be on storage that all nodes share" in outcome["message"]
    assert "or write the run to a place that every node reaches" in outcome["message"]
