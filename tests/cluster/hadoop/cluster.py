"""A real HDFS and YARN on the hosts of a lab.

NameNode and ResourceManager run on the first host, DataNode and NodeManager on each. Hadoop needs
the names of its hosts, so /etc/hosts is replaced for its processes; /etc/krb5.conf as well, if the
cluster demands Kerberos. Files are in the lab's folder.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.cluster.hadoop.realm import Realm
from tests.support.commands import run_command, start_command
from tests.support.environment import kept_environment
from tests.support.hadoop_jars import class_path

from paceline.base.host.processes import command_line_of, end_processes, send
from paceline.base.host.spark import find_spark
from paceline.collectives.host import wait_until
from paceline.runner.lab.network import processes_in

if TYPE_CHECKING:
    from paceline.runner.lab import Lab
    from paceline.runner.lab.record import Host

NODE_MEMORY_MIB, NODE_CORES = 4096, 4
_START_S, _END_S, _CALL_S = 300.0, 10.0, 500.0
_PACKAGES = {
    "NameNode": "hdfs.server.namenode",
    "DataNode": "hdfs.server.datanode",
    "ResourceManager": "yarn.server.resourcemanager",
    "NodeManager": "yarn.server.nodemanager",
}
_JAVA = (
    "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData",
    "--add-opens=java.base/java.lang=ALL-UNNAMED",
    "--add-opens=java.security.jgss/sun.security.krb5=ALL-UNNAMED",
)  # fmt: skip
_GET = "import sys, urllib.request as r; print(r.urlopen(sys.argv[1], timeout=5).read().decode())"
_LOG4J = """\
log4j.rootLogger=INFO,console
log4j.appender.console=org.apache.log4j.ConsoleAppender
log4j.appender.console.layout=org.apache.log4j.PatternLayout
log4j.appender.console.layout.ConversionPattern=%d{ISO8601} %p %c{1}: %m%n
"""


@dataclass(slots=True)
class Hadoop:
    """Runs commands on the first host, as a user on a gateway host does."""

    lab: Lab
    folder: Path
    environment: dict[str, str]
    realm: Realm | None = None
    daemons: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def call(
        self, *words: object, limit_s: float = _CALL_S, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the first host and return how it ended."""
        command = self._command(self.lab.hosts[0], *words)
        variables = {**self.environment, **variables}
        return run_command(command, limit_s, env=variables, cwd=self.folder)

    def paceline(
        self, site: Path, *words: object, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command of Paceline; site: folder of spark-defaults.conf."""
        own = {"SPARK_CONF_DIR": str(site), "SPARK_PRINT_LAUNCH_COMMAND": "1", **variables}
        return self.call(sys.executable, "-m", "paceline.cli", *words, **own)

    def submit(
        self, site: Path, *words: object, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run spark-submit with master yarn."""
        program = find_spark().path / "bin" / "spark-submit"
        own = {"SPARK_CONF_DIR": str(site), "PYSPARK_PYTHON": sys.executable, **variables}
        return self.call(program, "--master", "yarn", *words, **own)

    def last_application(self) -> str:
        """Return the id of the latest application that had a container."""
        return max(folder.name for folder in self.folder.glob("logs-*/application_*"))

    def applications(self, *states: str) -> set[str]:
        """Return the ids of the applications that are in one of YARN's states."""
        address = self.lab.hosts[0].address
        query = f"states={','.join(states)}"
        answer = self._text(f"http://{address}:8088/ws/v1/cluster/apps?{query}")
        return set(re.findall(r"application_\d+_\d+", answer))

    def container_files(self, application: str, name: str) -> list[str]:
        """Return the texts of a file in the logs of each container of an application."""
        files = sorted(self.folder.glob(f"logs-*/{application}/*/{name}"))
        return [file.read_text("utf-8", "replace") for file in files]

    def logs(self) -> str:
        files = sorted(self.folder.glob("*.log"))
        return "\n".join(f"{file.name}:\n{file.read_text()[-3000:]}" for file in files)

    def start(self, name: str, host: Host) -> None:
        """Start a daemon on a host."""
        log = self.folder / f"{name}-{host.number}.log"
        command = self._command(host, *self.java(host, name))
        self.daemons.append(start_command(command, log, env=self.environment))

    def place(self, host: Host) -> str:
        """Return how daemons name a host: principals of Kerberos contain host names."""
        return host.address if self.realm is None else host.name

    def start_kdc(self, realm: Realm) -> None:
        """Start the KDC on the first host, and get a ticket for the user."""
        log = self.folder / "kdc.log"
        command = self._command(self.lab.hosts[0], *realm.server)
        self.daemons.append(start_command(command, log, env=realm.environment))

        def has_ticket() -> bool:
            return self.call(*realm.log_in).returncode == 0

        assert wait_until(has_ticket, _START_S, poll_s=0.5), log.read_text()

    @contextmanager
    def lost_node(self, host: Host) -> Iterator[None]:
        """Kill the NodeManager of a host with all containers; start it again after the block."""
        pids = processes_in(host.namespace)
        kept = {
            pid for pid in pids if any(word.endswith(".DataNode") for word in command_line_of(pid))
        }
        send(pids - kept, signal.SIGKILL)
        try:
            yield
        finally:
            self.start("NodeManager", host)
            assert wait_until(self.is_ready, _START_S, poll_s=0.5), self.logs()

    def java(self, host: Host, name: str, *arguments: str) -> Sequence[str]:
        """Return the command of a daemon."""
        java = f"{self.environment['JAVA_HOME']}/bin/java"
        main = f"org.apache.hadoop.{_PACKAGES[name]}.{name}"
        values = (f"-Dlab.host={self.place(host)}", f"-Dlab.number={host.number}")
        # Jetty leaves folders there
        folder = f"-Djava.io.tmpdir={self.folder}"
        classes = ("-cp", f"{self.folder}/conf:{class_path()}")
        return [java, *_JAVA, *values, folder, *classes, main, *arguments]

    def is_ready(self) -> bool:
        """Return whether all nodes of both services have registered."""
        address, hosts = self.lab.hosts[0].address, len(self.lab.hosts)
        yarn = self._asked(f"http://{address}:8088/ws/v1/cluster/metrics")
        if yarn is None or yarn.get("activeNodes") != hosts:
            return False
        query = "Hadoop:service=NameNode,name=FSNamesystemState"
        hdfs = self._asked(f"http://{address}:9870/jmx?qry={query}")
        return hdfs is not None and any(b["NumLiveDataNodes"] == hosts for b in hdfs["beans"])

    def _command(self, host: Host, *words: object) -> list[str]:
        # Each command on a host has mounts of its own (ip-netns(8)).
        files = {"/etc/hosts": self.folder / "hosts"}
        if self.realm is not None:
            files["/etc/krb5.conf"] = self.realm.configuration
        mounts = "".join(f"mount --bind {file} {place} && " for place, file in files.items())
        return host.command("sh", "-c", f'{mounts}exec "$@"', "sh", *words)

    def _asked(self, url: str) -> dict[str, Any] | None:
        answer = self._text(url)
        # No object has a name here, other than in an installed Hadoop: {"activeNodes": 2}
        found: dict[str, Any] | None = json.loads(answer) if answer else None
        return found

    def _text(self, url: str) -> str:
        return self.call(sys.executable, "-I", "-S", "-c", _GET, url).stdout


@contextmanager
def hadoop_on(lab: Lab, *, secured: bool = False) -> Iterator[Hadoop]:
    """Start HDFS and YARN on the hosts of a lab; yield when all nodes have registered.

    secured: with Kerberos and a KDC on the first host.
    """
    folder = Path(lab.record.folder, "hadoop")
    (folder / "conf").mkdir(parents=True)
    names = "".join(f"{host.address} {host.name}\n" for host in lab.hosts)
    (folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}", "utf-8")
    realm = Realm(folder / "realm") if secured else None
    java = Path(shutil.which("java") or "").resolve()
    environment = kept_environment(
        JAVA_HOME=str(java.parent.parent),
        HADOOP_CONF_DIR=str(folder / "conf"),
        **({"HADOOP_USER_NAME": "root"} if realm is None else {"KRB5CCNAME": realm.tickets}),
    )
    hadoop = Hadoop(lab, folder, environment, realm)
    first = lab.hosts[0]
    own = {} if realm is None else realm.settings()
    _configure(folder / "conf", hadoop.place(first), folder, len(lab.hosts), own)
    try:
        if realm is not None:
            realm.make(lab.hosts)
            hadoop.start_kdc(realm)
        formatted = hadoop.call(*hadoop.java(first, "NameNode", "-format", "-nonInteractive"))
        assert formatted.returncode == 0, formatted.stdout + formatted.stderr
        for name in ("NameNode", "ResourceManager"):
            hadoop.start(name, first)
        for host in lab.hosts:
            for name in ("DataNode", "NodeManager"):
                hadoop.start(name, host)
        assert wait_until(hadoop.is_ready, _START_S, poll_s=0.5), hadoop.logs()
        yield hadoop
    finally:
        end_processes(hadoop.daemons[::-1], _END_S)


def _configure(
    conf: Path, first: str, folder: Path, hosts: int, own: Mapping[str, Mapping[str, object]]
) -> None:
    """Write the configuration. own: further settings of a file, which replace others."""
    # ${lab.…} is a system property of each daemon.
    host, number = "${lab.host}", "${lab.number}"
    queues = "yarn.scheduler.capacity.root"
    files: dict[str, dict[str, object]] = {
        "core-site.xml": {
            "fs.defaultFS": f"hdfs://{first}:9820",
            "hadoop.tmp.dir": folder / "tmp",
            "ipc.client.connect.max.retries": 20,
        },
        "hdfs-site.xml": {
            "dfs.namenode.name.dir": folder / "names",
            "dfs.namenode.http-address": f"{first}:9870",
            "dfs.namenode.datanode.registration.ip-hostname-check": "false",
            "dfs.datanode.data.dir": folder / f"data-{number}",
            "dfs.datanode.hostname": host,
            "dfs.datanode.address": f"{host}:9866",
            "dfs.datanode.http.address": f"{host}:9864",
            "dfs.datanode.ipc.address": f"{host}:9867",
            "dfs.replication": hosts,
        },
        "yarn-site.xml": {
            "yarn.resourcemanager.hostname": first,
            # A node that is lost is noticed after this; the default is 10 minutes.
            "yarn.nm.liveness-monitor.expiry-interval-ms": 10_000,
            "yarn.resourcemanager.nm.liveness-monitor.interval-ms": 1000,
            "yarn.scheduler.minimum-allocation-mb": 64,
            "yarn.nodemanager.hostname": host,
            "yarn.nodemanager.resource.memory-mb": NODE_MEMORY_MIB,
            "yarn.nodemanager.resource.cpu-vcores": NODE_CORES,
            "yarn.nodemanager.local-dirs": folder / f"local-{number}",
            "yarn.nodemanager.log-dirs": folder / f"logs-{number}",
            "yarn.nodemanager.delete.debug-delay-sec": 600,  # keeps the logs of containers
            "yarn.nodemanager.container-monitor.interval-ms": 500,
            "yarn.nodemanager.pmem-check-enabled": "true",
            # Else YARN leaves the check to cgroups, even where it does not use them.
            "yarn.nodemanager.resource.memory.enforced": "false",
            # Address space says little about JVMs and torch; many sites switch this off.
            "yarn.nodemanager.vmem-check-enabled": "false",
            "yarn.nodemanager.disk-health-checker.max-disk-utilization-per-disk-percentage": 100,
            # Containers find their own address without a name service.
            "yarn.nodemanager.env-whitelist": "JAVA_HOME,SPARK_LOCAL_HOSTNAME",
        },
        "capacity-scheduler.xml": {
            f"{queues}.queues": "default,full",
            f"{queues}.default.capacity": 99,
            f"{queues}.full.capacity": 1,  # less than any container needs
            f"{queues}.full.maximum-capacity": 1,
            "yarn.scheduler.capacity.maximum-am-resource-percent": 1,
            "yarn.scheduler.capacity.resource-calculator": (
                "org.apache.hadoop.yarn.util.resource.DominantResourceCalculator"
            ),
        },
    }
    for file, values in files.items():
        _write(conf / file, {**values, **own.get(file, {})})
    (conf / "log4j.properties").write_text(_LOG4J, "utf-8")


def _write(file: Path, values: Mapping[str, object]) -> None:
    properties = "\n".join(
        f"<property><name>{name}</name><value>{value}</value></property>"
        for name, value in values.items()
    )
    file.write_text(f"<configuration>\n{properties}\n</configuration>\n", "utf-8")
