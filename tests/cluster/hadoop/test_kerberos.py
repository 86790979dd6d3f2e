"""HDFS and YARN with two nodes that demand Kerberos."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cluster.hadoop.cluster import Hadoop
from tests.cluster.hadoop.runs import hadoop_on_two_hosts
from tests.support.hadoop_jars import class_path

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.needs("lab", "hadoop", "kerberos"),
    pytest.mark.timeout(900),
]

NO_TICKET = {"KRB5CCNAME": "FILE:/nonexistent/tickets"}
FETCH_TOKEN = "org.apache.hadoop.hdfs.tools.DelegationTokenFetcher"
NAMES = "import sys; from paceline.data.location import location_of as at; "
NAMES += "print(*at(sys.argv[1]).names())"


@pytest.fixture(scope="module")
def hadoop() -> Iterator[Hadoop]:
    with hadoop_on_two_hosts(secured=True) as started:
        yield started


def test_webhdfs_needs_a_delegation_token_or_a_package(hadoop: Hadoop, tmp_path: Path) -> None:
    url = f"webhdfs://{hadoop.lab.hosts[0].name}:9870/?kerberos=true"
    read = (sys.executable, "-c", NAMES, url)
    refused = hadoop.call(*read)
    assert "expected the package requests_kerberos" in refused.stderr
    java = f"{hadoop.environment['JAVA_HOME']}/bin/java"
    classes = f"{hadoop.folder}/conf:{class_path()}"
    tokens = tmp_path / "tokens"
    fetched = hadoop.call(java, "-cp", classes, FETCH_TOKEN, "--renewer", "rm", tokens)
    assert fetched.returncode == 0, fetched.stderr
    ended = hadoop.call(*read, HADOOP_TOKEN_FILE_LOCATION=str(tokens), **NO_TICKET)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "\n"  # HDFS is empty
