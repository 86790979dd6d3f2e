"""Commands that copy from and to remote places."""

from __future__ import annotations

from pathlib import Path

from paceline.base.host.files import hadoop_fs, how_to_fetch
from paceline.base.host.spark import find_spark


def test_program_of_the_site_comes_first(tmp_path: Path) -> None:
    program = tmp_path / "hadoop"
    program.write_text("#!/bin/sh\n", "utf-8")
    program.chmod(0o755)
    assert hadoop_fs({"PATH": str(tmp_path)}) == [str(program), "fs"]


def test_classes_in_sparks_jars_read_the_configuration_of_the_site(tmp_path: Path) -> None:
    *_, option, classes, main = hadoop_fs({"PATH": "", "HADOOP_CONF_DIR": str(tmp_path)})
    assert (option, main) == ("-cp", "org.apache.hadoop.fs.FsShell")
    assert classes == f"{tmp_path}:{find_spark({}).path}/jars/*"


def test_command_that_fetches_from_an_object_store_has_no_options_of_pyarrow() -> None:
    command = how_to_fetch("s3://bucket/runs/a?region=eu-west-1")
    assert command == "aws s3 cp --recursive s3://bucket/runs/a a"


def test_command_that_fetches_from_hdfs_is_that_of_hadoop() -> None:
    assert how_to_fetch("hdfs://head:8020/runs/a").endswith(" -get hdfs://head:8020/runs/a a")
