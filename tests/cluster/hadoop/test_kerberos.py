"""HDFS and YARN with two nodes that demand Kerberos."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cluster.hadoop.cluster import Hadoop
from tests.cluster.hadoop.runs import hadoop_on_two_hosts, local_copy, site_conf, spec_text

from paceline.base.host.spark import find_spark

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.needs("lab", "hadoop", "kerberos"),
    pytest.mark.timeout(900),
]


@pytest.fixture(scope="module")
def hadoop() -> Iterator[Hadoop]:
    with hadoop_on_two_hosts(secured=True) as started:
        yield started


def test_records_of_a_node_without_the_run_arrive_with_its_tokens(
    hadoop: Hadoop, tiny_dataset: Path, tmp_path: Path
) -> None:
    spec, site = tmp_path / "spec.toml", site_conf(tmp_path, {"driver": [], "executor": []})
    text = f'{spec_text(tiny_dataset)}[spark.conf]\n"spark.executorEnv.SPARK_HOME" = '
    text += f'"{find_spark().path}"\n"spark.executorEnv.HADOOP_CONF_DIR" = "{hadoop.folder}/conf"\n'
    spec.write_text(text, "utf-8")
    url = f"hdfs://{hadoop.lab.hosts[0].name}:9820/runs/secured"
    ended = hadoop.paceline(site, "run", spec, "--out", url)
    assert ended.returncode == 0, ended.stdout + ended.stderr + hadoop.logs()
    compared = json.loads((local_copy(hadoop, ended.stderr, url) / "comparison.json").read_text())
    spark = [row["equivalent"] for row in compared["rows"] if row["launcher"] == "spark"]
    assert spark == [True]
