"""The images are built from a clean Debian and run the quickstart, with no Docker daemon.

Building takes minutes, gigabytes and the package index, so it is done where it is asked for:
PACELINE_TEST_IMAGES=1. PACELINE_TEST_IMAGES_OPTIONS are passed to `buildah bud` (say, a volume with
a proxy's certificates), PACELINE_TEST_IMAGES_WHEELS names a folder with wheels for docker/wheels/.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DEBIAN = "http://deb.debian.org/debian"
BUILD_LIMIT_S = 1800
CONTEXT = ("LICENSE", "python", "docker", "mpi-jobs", "spark-jobs", ".dockerignore")


def why_not() -> str | None:
    if os.environ.get("PACELINE_TEST_IMAGES") != "1":
        return "builds images for minutes; asked for by PACELINE_TEST_IMAGES=1"
    if os.geteuid() != 0:
        return "debootstrap and buildah's chroot isolation need root"
    missing = [name for name in ("buildah", "debootstrap") if shutil.which(name) is None]
    return f"needs {', '.join(missing)}" if missing else None


pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(3 * BUILD_LIMIT_S),
    pytest.mark.skipif(why_not() is not None, reason=why_not() or ""),
]


class Images:
    """Buildah with a storage of its own, so that nothing of the machine's is touched."""

    def __init__(self, folder: Path) -> None:
        self._storage = ["--root", folder / "store", "--runroot", folder / "run"]

    def buildah(self, *words: object, limit_s: float = BUILD_LIMIT_S) -> str:
        ended = subprocess.run(
            ["buildah", *map(str, self._storage), *map(str, words)],
            env={**os.environ, "STORAGE_DRIVER": "vfs", "BUILDAH_ISOLATION": "chroot"},
            capture_output=True, text=True, timeout=limit_s, check=False,
        )  # fmt: skip
        assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
        return ended.stdout

    def run(self, image: str, *words: str, limit_s: float = 900) -> str:
        """The command's standard output, in a fresh container."""
        container = self.buildah("from", "--pull-never", f"localhost/{image}").strip()
        try:
            return self.buildah("run", container, "--", *words, limit_s=limit_s)
        finally:
            self.buildah("rm", container)


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    subprocess.run(
        ["debootstrap", "--variant=minbase", "--include=ca-certificates", "bookworm",
         str(folder / "base"), DEBIAN],
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
    yield built
    shutil.rmtree(folder)  # gigabytes, which pytest would keep


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
        "paceline run quickstart --out /shared/runs/q >&2 && paceline compare /shared/runs/q --json",
    )  # fmt: skip
    rows = json.loads(said)["rows"]
    assert {row["launcher"] for row in rows} == {"local", "torchrun", "mpi", "spark"}
    assert all(row["identical"] for row in rows)


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
