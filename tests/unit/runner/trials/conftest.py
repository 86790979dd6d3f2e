"""Remote places: S3 on loopback, and a local folder behind a program that acts as Hadoop's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.s3 import CREDENTIALS, S3Server, s3_server

# `hadoop fs` for hdfs://fake:1. The real one: tests/cluster/hadoop.
_HADOOP = """#!/bin/sh
shift
for word; do
  shift
  case $word in hdfs://fake:1/*) word={folder}/${{word#hdfs://fake:1/}} ;; esac
  set -- "$@" "$word"
done
operation=$1
shift
case $operation in
  -mkdir) mkdir -p "$2" ;;
  -ls)
    case $2 in */private) echo "ls: Permission denied: user=guest" >&2; exit 1 ;; esac
    if [ ! -d "$2" ]; then echo "ls: $2: No such file or directory" >&2; exit 1; fi
    for path in "$2"/*; do [ ! -e "$path" ] || echo "hdfs://fake:1/${{path#{folder}/}}"; done
    ;;
  -rm) rm -rf $4 ;;
  -put | -get) cp -r "$@" ;;
  *) exit 1 ;;
esac
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server() as running:
        running.upload(tmp_path_factory.mktemp("empty"), "other")  # makes the bucket
        yield running


@pytest.fixture
def url(server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Return a URL at which nothing is."""
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    return server.url(f"runs/{tmp_path.name}")


@pytest.fixture
def hdfs_url(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Return the same for Hadoop's own client."""
    program = tmp_path / "bin" / "hadoop"
    program.parent.mkdir()
    program.write_text(_HADOOP.format(folder=tmp_path / "hdfs"), "utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    return "hdfs://fake:1/runs/new"
