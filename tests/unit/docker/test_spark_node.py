"""Test what `docker/spark-node` starts. Two scripts stand in for Python and Java."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import pytest

NODE = Path(__file__).parents[3] / "docker" / "spark-node"
EXECUTOR = {
    "SPARK_EXECUTOR_MEMORY": "1g", "SPARK_DRIVER_URL": "spark://d:1", "SPARK_EXECUTOR_ID": "7",
    "SPARK_EXECUTOR_CORES": "2", "SPARK_APPLICATION_ID": "app", "SPARK_EXECUTOR_POD_IP": "10.0.0.7",
    "SPARK_EXECUTOR_POD_NAME": "pod-7",
}  # fmt: skip


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Return the folder that stands in for those of Spark and Java."""
    (tmp_path / "bin").mkdir()
    stand_in(tmp_path, python=f"echo {tmp_path}", java='printf "%s\\n" "$@"')
    return tmp_path


def stand_in(home: Path, **programs: str) -> None:
    """Write programs of one line."""
    for name, line in programs.items():
        program = home / "bin" / name
        program.write_text(f"#!/bin/sh\n{line}\n")
        program.chmod(0o755)


def started(home: Path, **variables: str) -> list[str]:
    """Return the lines that Java of an executor prints: its arguments."""
    environment = {"PATH": f"{home}/bin:{os.environ['PATH']}", **EXECUTOR, **variables}
    ended = subprocess.run(
        ["sh", NODE, "executor"], env=environment, capture_output=True, text=True, timeout=30,
        check=True,
    )  # fmt: skip
    return ended.stdout.splitlines()


def classpath(home: Path, **variables: str) -> list[str]:
    words = started(home, **variables)
    return words[words.index("-cp") + 1].split(":")


def test_executor_has_the_jars_of_spark(home: Path) -> None:
    assert classpath(home) == [f"{home}/jars/*"]


def test_executor_has_settings_and_classes_of_the_site(home: Path) -> None:
    found = classpath(
        home, SPARK_CONF_DIR="/conf", HADOOP_CONF_DIR="/hadoop", SPARK_CLASSPATH="/mounted",
        SPARK_EXTRA_CLASSPATH="/extra/*", SPARK_DIST_CLASSPATH="/dist/*",
    )  # fmt: skip
    assert found == ["/conf", "/hadoop", "/mounted", f"{home}/jars/*", "/extra/*", "/dist/*"]


def test_user_id_without_a_name_gets_one(home: Path) -> None:
    stand_in(home, id='[ "$1" != -un ] && echo 54321', java='tail -n 1 "$NSS_WRAPPER_PASSWD"')
    [entry] = started(home, TMPDIR=str(home))
    name, _, uid, gid, _, folder, _ = entry.split(":")
    assert (name, uid, gid) == ("paceline", "54321", "54321")
    assert os.access(folder, os.W_OK)


def health(home: Path) -> int:
    environment = {
        "PATH": f"{home}/bin:{os.environ['PATH']}",
        "TMPDIR": str(home), "SPARK_LOCAL_HOSTNAME": "127.0.0.1",
    }  # fmt: skip
    ended = subprocess.run(
        ["sh", NODE, "health"], env=environment, capture_output=True, timeout=30, check=False
    )
    return ended.returncode


def test_a_daemon_is_healthy_while_it_listens_and_the_check_starts_no_python(home: Path) -> None:
    (home / "bin" / "python").write_text("#!/bin/sh\nexit 1\n")
    with socket.create_server(("127.0.0.1", 0)) as daemon:
        (home / "spark-node.port").write_text(f"{daemon.getsockname()[1]}\n")
        assert health(home) == 0
    assert health(home) != 0
