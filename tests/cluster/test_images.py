"""The images are built from a clean Debian and run the quickstart, with no Docker daemon.

Building takes minutes, gigabytes and the package index, so it is done where it is asked for:
PACELINE_TEST_REQUIRE=images. PACELINE_TEST_IMAGES_OPTIONS are passed to `buildah bud` (say, a
volume with a proxy's certificates), PACELINE_TEST_IMAGES_WHEELS names a folder with wheels for
docker/wheels/.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from tests.support.commands import run_command

from paceline.runner.lab import why_not as why_no_lab
from paceline.runner.lab.record import LabSettings
from paceline.runner.lab.session import Lab

ROOT = Path(__file__).resolve().parents[2]
BUILD_LIMIT_S = 1800
RUN_LIMIT_S = 1800
CONTEXT = ("LICENSE", "python", "docker", "mpi-jobs", "spark-jobs", ".dockerignore")


pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(3 * BUILD_LIMIT_S),
    pytest.mark.needs("images"),
]


class Images:
    """Buildah with a storage of its own, so that nothing of the machine's is touched."""

    def __init__(self, folder: Path) -> None:
        self._storage = ["--root", folder / "store", "--runroot", folder / "run"]
        self.environment = {**os.environ, "BUILDAH_ISOLATION": "chroot"}

    def command(self, *words: object) -> list[str]:
        return ["buildah", *map(str, self._storage), *map(str, words)]

    def buildah(self, *words: object, limit_s: float = BUILD_LIMIT_S) -> str:
        ended = run_command(self.command(*words), limit_s, env=self.environment)
        assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
        return ended.stdout

    @contextmanager
    def container(self, image: str):
        name = self.buildah("from", "--pull-never", f"localhost/{image}").strip()
        try:
            # Once and here. A lab's host has a mount namespace of its own: what `run` mounts there
            # is not there for a second `run`, which takes it for mounted.
            self.buildah("mount", name)
            yield name
        finally:
            self.buildah("rm", name)

    def run(
        self, image: str, *words: str, volume: str | None = None, limit_s: float = RUN_LIMIT_S
    ) -> str:
        """The command's standard output, in a fresh container."""
        volumes = ["--volume", volume] if volume else []
        with self.container(image) as name:
            return self.buildah("run", *volumes, name, "--", *words, limit_s=limit_s)


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    try:
        yield build(folder)
    finally:  # gigabytes, which pytest would keep
        unmount_below(folder)
        shutil.rmtree(folder)


def unmount_below(folder: Path) -> None:
    """Takes away what a build that was cut off left mounted."""
    lines = Path("/proc/self/mounts").read_text().splitlines()
    places = [
        place for place in (line.split()[1] for line in lines) if folder in Path(place).parents
    ]
    for place in reversed(places):
        subprocess.run(["umount", place], check=True, timeout=60)


def build(folder: Path) -> Images:
    subprocess.run(
        ["debootstrap", "--variant=minbase", "--include=ca-certificates", "bookworm",
         str(folder / "base")],
        check=True, capture_output=True, timeout=BUILD_LIMIT_S,
    )  # fmt: skip
    (folder / "base.Containerfile").write_text('FROM scratch\nCOPY base/ /\nCMD ["/bin/sh"]\n')
    built = Images(folder)
    built.buildah("bud", "-f", folder / "base.Containerfile", "-t", "debian-base", folder)
    shutil.rmtree(folder / "base")
    context = copied_context(folder / "context")
    for target in ("base", "spark", "mpi"):
        built.buildah(
            "bud", "--layers", "--pull-never", "--build-arg", "BASE=localhost/debian-base",
            *shlex.split(os.environ.get("PACELINE_TEST_IMAGES_OPTIONS", "")),
            "-f", context / "docker" / "Dockerfile", "--target", target,
            "-t", f"paceline-{target}", context,
        )  # fmt: skip
    return built


def copied_context(folder: Path) -> Path:
    ignored = shutil.ignore_patterns("*cache*", "*.egg-info", "runs")
    folder.mkdir()
    for name in CONTEXT:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=ignored)
        else:
            shutil.copy2(source, folder / name)
    if wheels := os.environ.get("PACELINE_TEST_IMAGES_WHEELS"):
        shutil.copytree(wheels, folder / "docker" / "wheels", dirs_exist_ok=True)
    return folder


def test_quickstart_runs_in_the_image_under_every_launcher(images):
    said = images.run(
        "paceline-base", "sh", "-c",
        "paceline run quickstart --out /shared/runs/q >&2 && "
        "paceline compare /shared/runs/q --json",
    )  # fmt: skip
    rows = json.loads(said)["rows"]
    assert {row["launcher"] for row in rows} == {"local", "torchrun", "mpi", "spark"}
    assert all(row["equivalent"] for row in rows)


def test_images_run_as_an_ordinary_user_and_hold_no_secrets(images):
    for image in ("base", "spark", "mpi"):
        said = images.run(
            f"paceline-{image}", "sh", "-c",
            "id -un; ls /shared/.ssh /shared/.spark-secret /etc/ssh/ssh_host_* 2>/dev/null | wc -l",
        )  # fmt: skip
        assert said.split() == ["paceline", "0"]


def test_tools_of_development_are_not_in_the_image(images):
    said = images.run(
        "paceline-base", "sh", "-c",
        "/opt/paceline/venv/bin/pip list --format=freeze 2>/dev/null",
    )  # fmt: skip
    names = {line.partition("==")[0].lower() for line in said.splitlines()}
    assert {"torch", "pyspark", "petastorm", "mpi4py"} <= names
    assert not {"pytest", "mypy", "ruff", "hypothesis"} & names


def test_images_with_the_cpu_build_of_torch_stay_below_two_gigabytes(images):
    if "PACELINE_TEST_IMAGES_WHEELS" not in os.environ:
        pytest.skip("torch of the package index brings CUDA along")
    for image in ("base", "spark", "mpi"):
        # Such as "1.96 GB", of 10^9 bytes; a base without apt's cache makes it smaller yet.
        size, unit = images.buildah(
            "images", "--format", "{{.Size}}", f"localhost/paceline-{image}"
        ).split()
        assert unit == "MB" or (unit == "GB" and float(size) < 2.0), f"{image}: {size} {unit}"


def test_mpi_node_lets_its_own_cluster_in_and_nobody_else(images):
    said = images.run(
        "paceline-mpi", "sh", "-c",
        "mpi-node node 2>/tmp/log & "
        "for _ in $(seq 50); do mpi-node health 2>/dev/null && break; sleep 0.1; done; "
        "mpi-node run ssh localhost 'echo in; which mpirun'; "
        "ssh -F /dev/null -p 2222 -o BatchMode=yes -o StrictHostKeyChecking=no localhost echo no "
        "2>&1 | grep -c denied; kill %1 2>/dev/null || kill $!",
        limit_s=60,
    )  # fmt: skip
    assert said.split() == ["in", "/opt/paceline/venv/bin/mpirun", "1"]


def test_spark_node_serves_a_master_that_asks_for_the_secret(images):
    said = images.run(
        "paceline-spark", "sh", "-c",
        "SPARK_LOCAL_HOSTNAME=127.0.0.1 SPARK_MASTER_PORT=17077 SPARK_MASTER_WEBUI_PORT=18080 "
        "spark-node master >/tmp/log 2>&1 & "
        "export SPARK_LOCAL_HOSTNAME=127.0.0.1; "
        "for _ in $(seq 100); do spark-node health 2>/dev/null && break; sleep 0.2; done; "
        "spark-node health && echo up; stat -c %a /shared/.spark-secret; kill $!",
        limit_s=90,
    )  # fmt: skip
    assert said.split() == ["up", "600"]


def test_spark_node_serves_as_the_driver_and_executor_of_kubernetes(images):
    programs = Path(__file__).parent / "programs"
    said = images.run(
        "paceline-spark", "python", "/programs/spark_pods.py",
        volume=f"{programs}:/programs:ro", limit_s=300,
    )  # fmt: skip
    assert json.loads(said) == {"said": ["328350"], "driver": 0, "executor": 0}


class Cluster:
    """Containers of one image, one on each host of a lab, with a folder that all of them see."""

    def __init__(self, images, lab, containers, shared) -> None:
        self._images, self.lab, self.shared = images, lab, shared
        self._containers = containers
        self._started: list[subprocess.Popen[bytes]] = []
        self._log = shared.with_name("daemons.log")

    def command(self, host: int, *words: str) -> list[str]:
        address = self.lab.hosts[host].address
        inside = self._images.command(
            "run", "--volume", f"{self.shared}:/shared",
            "--env", f"SPARK_LOCAL_HOSTNAME={address}", "--env", "SPARK_WORKER_CORES=1",
            self._containers[host], "--", *words,
        )  # fmt: skip
        return self.lab.hosts[host].command(*inside)

    def start(self, host: int, node: str, *words: str) -> None:
        """A daemon; returns when the image's own health check says that it serves."""
        with self._log.open("ab") as log:
            self._started.append(
                subprocess.Popen(
                    self.command(host, node, *words),
                    env=self._images.environment,
                    stdout=log,
                    stderr=log,
                )
            )
        give_up_s = time.monotonic() + 60
        while (healthy := self.call(host, node, "health")).returncode != 0:
            said = healthy.stderr[-1000:] + self._log.read_text()[-2000:]
            assert time.monotonic() < give_up_s, f"{node} {words} does not serve: {said}"
            time.sleep(0.5)

    def call(self, host: int, *words: str) -> subprocess.CompletedProcess[str]:
        command = self.command(host, *words)
        return run_command(command, RUN_LIMIT_S, env=self._images.environment)

    def rows(self, node: str, spec: str):
        """The rows of a run of `spec`, started on the first host."""
        (self.shared / "spec.toml").write_text(spec)
        ended = self.call(
            0, node, "paceline", "run", "/shared/spec.toml", "--out", "/shared/runs/test"
        )
        assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
        return json.loads((self.shared / "runs" / "test" / "comparison.json").read_text())["rows"]

    def stop(self) -> None:
        for process in self._started:
            process.terminate()
        for process in self._started:
            process.wait(timeout=30)


@pytest.fixture
def cluster(images, tmp_path):
    """Makes a cluster of three containers of an image."""
    reason = why_no_lab()
    if reason is not None:
        pytest.skip(f"clusters of containers need a lab: {reason}")
    shared = tmp_path / "shared"
    shared.mkdir()
    os.chown(shared, 1000, 1000)
    with ExitStack() as stack:
        lab = stack.enter_context(Lab(LabSettings(hosts=3)))

        def make(image: str) -> Cluster:
            names = [stack.enter_context(images.container(image)) for _ in lab.hosts]
            made = Cluster(images, lab, names, shared)
            stack.callback(made.stop)
            return made

        yield make


def cluster_spec(name: str) -> str:
    return (ROOT / "docker" / "experiments" / f"{name}.toml").read_text()


def test_two_mpi_containers_run_the_quickstarts_workload(cluster):
    nodes = cluster("paceline-mpi")
    for host in (1, 2):
        nodes.start(host, "mpi-node", "node")
    addresses = [host.address for host in nodes.lab.hosts[1:]]
    (nodes.shared / "hosts").write_text("".join(f"{a} slots=1\n" for a in addresses))
    spec = cluster_spec("cluster-mpi").replace("/opt/paceline/experiments/hosts", "/shared/hosts")
    rows = nodes.rows("mpi-node", spec)
    assert {(row["launcher"], row["nodes"]) for row in rows} == {("local", 1), ("mpi", 2)}
    assert all(row["equivalent"] for row in rows)


def test_two_spark_workers_in_containers_run_the_quickstarts_workload(cluster):
    nodes = cluster("paceline-spark")
    master = nodes.lab.hosts[0].address
    nodes.start(0, "spark-node", "master")
    for host in (1, 2):
        nodes.start(host, "spark-node", "worker", f"spark://{master}:7077")
    rows = nodes.rows("spark-node", cluster_spec("cluster-spark").replace("spark-master", master))
    assert {(row["launcher"], row["nodes"]) for row in rows} == {("local", 1), ("spark", 2)}
    assert all(row["equivalent"] for row in rows)
