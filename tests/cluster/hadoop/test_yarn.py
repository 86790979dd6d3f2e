"""Trials on a real YARN with two nodes.

The nodes are the hosts of a lab and share the cores of this machine.
"""

from __future__ import annotations

import json
import re
import sys
import tarfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.cluster.hadoop.cluster import Hadoop
from tests.cluster.hadoop.runs import (
    JOBS,
    hadoop_on_two_hosts,
    local_copy,
    site_conf,
    spec_text,
    trial_file,
)
from tests.support.waiting import wait_for

from paceline.base.errors import ExitCode
from paceline.base.host.spark import find_spark
from paceline.collectives.host import wait_until
from paceline.runner.lab.network import processes_in

pytestmark = [pytest.mark.cluster, pytest.mark.needs("lab", "hadoop"), pytest.mark.timeout(900)]

LAST = """
[[trials]]
launcher = "local"
local_strategy = "processes"
ranks_per_node = 2
oversubscribe = true
"""
FAULTY = Path(__file__).with_name("faulty_task.py")
# Options of a site, which must arrive in every JVM.
KERBEROS, PROXY = "-Djava.security.krb5.conf=/etc/site/krb5.conf", "-Dhttp.proxyHost=proxy.example"
TRUST, PORT = "-Djavax.net.ssl.trustStore=/etc/site/trust.jks", "-Dhttp.proxyPort=3128"
SITE = {"driver": (KERBEROS, PROXY), "executor": (TRUST, PORT)}


@pytest.fixture(scope="module")
def hadoop() -> Iterator[Hadoop]:
    with hadoop_on_two_hosts() as started:
        yield started


def environment_archive(folder: Path) -> Path:
    """Pack an environment like `tar -C ENV -czf` does; its packages are those of this one.

    Its Python makes a file in `folder`/used with the name of its working directory.
    """
    used = folder / "used"
    used.mkdir()
    packages = folder / "environment/lib/python3.11/site-packages"
    packages.mkdir(parents=True)
    (folder / "environment/bin").mkdir()
    (folder / "environment/bin/python").symlink_to(Path(sys.base_prefix, "bin", "python3.11"))
    (folder / "environment/pyvenv.cfg").write_text(f"home = {sys.base_prefix}/bin\n", "utf-8")
    paths = [path for path in sys.path if path.endswith("site-packages")]
    lines = [f"import site; site.addsitedir({path!r})" for path in paths]
    lines += [
        f"import os, pathlib; pathlib.Path({str(used)!r}, os.path.basename(os.getcwd())).touch()"
    ]
    (packages / "all.pth").write_text("\n".join(lines) + "\n", "utf-8")
    archive = folder / "environment.tar.gz"
    with tarfile.open(archive, "w:gz") as file:
        file.add(folder / "environment", ".")
    return archive


@dataclass(frozen=True, slots=True)
class Run:
    """A run with a trial under Spark, and its copy at a place that all nodes reach."""

    folder: Path
    url: str
    used: Path  # files of the Pythons that used the shipped environment
    application: str  # of the trial

    def trial_file(self, name: str) -> Path:
        return trial_file(self.folder, name)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return site_conf(tmp_path_factory.mktemp("site"), SITE)


@pytest.fixture(scope="module")
def run(
    hadoop: Hadoop, site: Path, tiny_dataset: Path, tmp_path_factory: pytest.TempPathFactory
) -> Run:
    """Run a baseline and a trial on two nodes, with a shipped environment. The second node does not
    see the run directory."""
    folder = tmp_path_factory.mktemp("yarn")
    spec = folder / "spec.toml"
    text = spec_text(tiny_dataset)
    text += f'[spark.conf]\n"spark.archives" = "{environment_archive(folder)}#environment"\n'
    text += '"spark.pyspark.python" = "./environment/bin/python"\n'
    # Nodes of this YARN have no program `hadoop`, so its class in Spark's jars is used; and this
    # YARN passes on fewer variables than others.
    text += f'"spark.executorEnv.SPARK_HOME" = "{find_spark().path}"\n'
    text += f'"spark.executorEnv.HADOOP_CONF_DIR" = "{hadoop.folder}/conf"\n'
    spec.write_text(text, "utf-8")
    url = f"hdfs://{hadoop.lab.hosts[0].address}:9820/runs/unshared"
    ended = hadoop.paceline(site, "run", spec, "--out", url)
    logs = "\n".join(
        file.read_text() for file in hadoop.folder.glob("runs/*/trials/*.spark.*/*.log")
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr + logs + hadoop.logs()
    out = local_copy(hadoop, ended.stderr, url)
    return Run(out, url, folder / "used", hadoop.last_application())


def test_trials_on_two_nodes_are_equivalent(hadoop: Hadoop, run: Run) -> None:
    rows = json.loads((run.folder / "comparison.json").read_text())["rows"]
    assert [row["equivalent"] for row in rows if row["launcher"] == "spark"] == [True]
    environments = [
        json.loads(run.trial_file(f"ranks/{rank}/environment.json").read_text()) for rank in (0, 1)
    ]
    assert {found["host"] for found in environments} == {host.name for host in hadoop.lab.hosts}
    statuses = [json.loads(run.trial_file(f"ranks/{n}/status.json").read_text()) for n in (0, 1)]
    assert [status["state"] for status in statuses] == ["done", "done"]


def test_node_that_does_not_see_the_run_says_so(hadoop: Hadoop, run: Run) -> None:
    said = "".join(hadoop.container_files(run.application, "stderr"))
    assert f"host {hadoop.lab.hosts[1].name} does not see" in said


def test_options_of_the_site_arrive_in_every_jvm(hadoop: Hadoop, run: Run) -> None:
    driver = run.trial_file("launcher.log").read_text()
    [command] = [line for line in driver.splitlines() if line.startswith("Spark Command:")]
    assert all(option in command for option in SITE["driver"])
    scripts = hadoop.container_files(run.application, "launch_container.sh")
    executors = [text for text in scripts if "CoarseGrainedExecutorBackend" in text]
    assert len(executors) == 2
    for text in executors:
        assert all(f"'{option}'" in text for option in SITE["executor"])


def test_executors_use_the_shipped_environment(run: Run) -> None:
    folders = {file.name for file in run.used.iterdir()}
    own = {name for name in folders if name.startswith("paceline-")}  # sends a node's records
    assert len(own) == 1
    used = {name.rpartition("_")[0] for name in folders - own}
    assert used == {run.application.replace("application", "container") + "_01"}


def test_job_trains_where_the_driver_is_in_the_cluster(
    hadoop: Hadoop, site: Path, tiny_dataset: Path, tmp_path: Path
) -> None:
    spec, out = tmp_path / "spec.toml", tmp_path / "run"
    spec.write_text(spec_text(tiny_dataset), "utf-8")
    ended = hadoop.submit(
        site, "--deploy-mode", "cluster", "--driver-memory", "512m",
        "--conf", "spark.driver.memoryOverhead=1g", "--conf", "spark.executor.memoryOverhead=1g",
        "--conf", "spark.yarn.maxAppAttempts=1",
        "--conf", f"spark.pyspark.python={sys.executable}",
        JOBS / "train.py", spec, "--only", "*.spark.*", "--out", out,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert json.loads(trial_file(out, "outcome.json").read_text())["status"] == "ok"
    [application, *_] = re.findall(r"application_\d+_\d+", ended.stderr)
    scripts = hadoop.container_files(application, "launch_container.sh")
    [driver] = [text for text in scripts if "deploy.yarn.ApplicationMaster" in text]
    assert all(f"'{option}'" in driver for option in SITE["driver"])


def test_a_queue_without_room_is_named_and_left(
    hadoop: Hadoop, site: Path, tiny_dataset: Path, tmp_path: Path
) -> None:
    spec = tmp_path / "spec.toml"
    spec.write_text(
        f'{spec_text(tiny_dataset)}[spark.conf]\n"spark.yarn.queue" = "full"\n', "utf-8"
    )
    ended = hadoop.paceline(
        site, "run", spec, "--out", tmp_path / "run", "--set", "limits.slots_s=30"
    )
    outcome = json.loads(trial_file(tmp_path / "run", "outcome.json").read_text())
    assert outcome["exit_code"] == ExitCode.ENVIRONMENT, ended.stderr
    assert "the queue full has no room" in outcome["message"]
    assert wait_until(lambda: not hadoop.applications("ACCEPTED"), 30)


def faulty_spec(data: Path, options: str) -> str:
    """Return the spec with a task that has faults in containers. options: of the task."""
    task = f'task = "{FAULTY}:Faulty"\noptions = {{ {options} }}'
    return spec_text(data).replace('name = "tiny"', f'name = "faulty"\n{task}')


def test_container_over_its_memory_is_named_with_the_setting(
    hadoop: Hadoop, site: Path, tiny_dataset: Path, tmp_path: Path
) -> None:
    spec, out = tmp_path / "spec.toml", tmp_path / "run"
    host = hadoop.lab.hosts[1].name
    text = faulty_spec(tiny_dataset, f'taken_mib = 700, taken_on = "{host}", sleep_s = 0.5')
    text += '[spark.conf]\n"spark.executor.memory" = "512m"\n'
    text += '"spark.executor.memoryOverhead" = "1g"\n'
    spec.write_text(text, "utf-8")
    ended = hadoop.paceline(site, "run", spec, "--out", out)
    outcome = json.loads(trial_file(out, "outcome.json").read_text())
    assert ended.returncode == outcome["exit_code"] == ExitCode.RANK_FAILED, ended.stderr
    killed = rf"rank \d of 2 \(host {host}, .*exceeding physical memory"
    assert re.search(killed, outcome["message"])
    assert "spark.executor.memoryOverhead ([spark.conf]" in outcome["message"]


def test_lost_node_is_named_and_the_run_goes_on(
    hadoop: Hadoop, site: Path, tiny_dataset: Path, tmp_path: Path
) -> None:
    spec, out = tmp_path / "spec.toml", tmp_path / "run"
    spec.write_text(faulty_spec(tiny_dataset, "sleep_s = 2.0") + LAST, "utf-8")
    host = hadoop.lab.hosts[1]
    before = {each.name: processes_in(each.namespace) for each in hadoop.lab.hosts}
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(hadoop.paceline, site, "run", spec, "--out", out)
        [lost] = wait_for(lambda: ranks_on(out, host.name), 200, "a step on each host")
        with hadoop.lost_node(host):
            ended = running.result()
            assert wait_until(lambda: not hadoop.applications("ACCEPTED", "RUNNING"), 60)
            for each in hadoop.lab.hosts:
                assert processes_in(each.namespace) <= before[each.name]
    outcome = json.loads(trial_file(out, "outcome.json").read_text())
    assert ended.returncode == outcome["exit_code"] == ExitCode.RANK_FAILED, ended.stderr
    assert outcome["failed_rank"] == lost
    assert f"rank {lost} of 2 (host {host.name}" in outcome["message"]
    assert "yarn node -list" in outcome["message"]  # YARN itself notices it after 10 s
    [last] = out.glob("trials/*.local.*.processes.*/outcome.json")
    assert json.loads(last.read_text())["status"] == "ok"


def ranks_on(run: Path, host: str) -> list[int]:
    """Return the ranks on a host when both ranks have made a step."""
    statuses = [
        json.loads(file.read_text()) for file in run.glob("trials/*.spark.*/ranks/*/status.json")
    ]
    steps = list(run.glob("trials/*.spark.*/ranks/*/steps.jsonl"))
    return [s["rank"] for s in statuses if s["host"] == host] if len(steps) == 2 else []


def test_run_on_both_nodes_is_fetched_from_hdfs(hadoop: Hadoop, site: Path, run: Run) -> None:
    check_fetched(hadoop, site, run.url, run.folder)


def check_fetched(hadoop: Hadoop, site: Path, url: str, local: Path) -> None:
    """Check that the command with which `compare` refuses a remote run fetches all of it."""
    refused = hadoop.paceline(site, "compare", url)
    [fetch] = re.findall(r"copy it here with: (.+)", refused.stderr)
    fetched = hadoop.call("sh", "-c", fetch)
    assert fetched.returncode == 0, fetched.stderr
    assert content(hadoop.folder / Path(url).name) == content(local)


def content(folder: Path) -> dict[str, bytes]:
    """Return the files below a folder by relative path."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}
