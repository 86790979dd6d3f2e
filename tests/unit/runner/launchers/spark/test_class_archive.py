"""Class-data archives, made by programs that stand for Java and spark-submit."""

from __future__ import annotations

import pytest

from paceline.base.errors import EnvironmentLacks
from paceline.base.host.programs import Tool
from paceline.runner.launchers.spark.class_archive import (
    archive_files,
    archive_option,
    archive_option_of_java,
    make_archives,
)

JAVA = """#!/bin/sh
for word in "$@"; do case $word in -XX:SharedArchiveFile=*) echo java >"${word#*=}";; esac; done
"""
# The option with several words is one argument.
SPARK = """#!/bin/sh
echo "$@" >"$(dirname "$0")/arguments"
test "$SPARK_LOCAL_IP" = 127.0.0.1 || exit 9
file=$(echo "$@" | sed 's/.*ArchiveClassesAtExit=//; s/ .*//')
echo classes >"$file"
"""


@pytest.fixture
def tools(tmp_path):
    """Java and Spark; their programs are made by `write`."""

    def write(path, text):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    java, spark = tmp_path / "jre/bin/java", tmp_path / "spark/bin/spark-submit"
    write(java, JAVA)
    write(spark, SPARK)
    return (
        Tool(path=java, version="21.0.8", why="a test"),
        Tool(path=spark.parent.parent, version="3.5.9", why="a test"),
        write,
    )


def test_archives_are_made_in_two_layers_and_then_used(tools, tmp_path):
    java, spark, _ = tools
    folder = tmp_path / "archives"
    assert archive_option(java, spark, folder) == ""
    make_archives(java, spark, folder)
    base, classes = archive_files(java, spark, folder)
    assert (base.read_text(), classes.read_text()) == ("java\n", "classes\n")
    assert sorted(folder.iterdir()) == sorted([base, classes])
    option = f"-XX:SharedArchiveFile={base}"
    assert archive_option(java, spark, folder) == f"{option}:{classes} -Xlog:cds*=error"
    assert archive_option_of_java(java, folder) == option
    arguments = (spark.path / "bin/arguments").read_text()
    assert f"-XX:SharedArchiveFile={base} " in arguments
    assert "--master local[2]" in arguments


def test_archives_of_another_version_are_not_used(tools, tmp_path):
    java, spark, _ = tools
    make_archives(java, spark, tmp_path)
    newer = Tool(path=java.path, version="21.0.9", why="a test")
    assert archive_option(newer, spark, tmp_path) == ""
    assert archive_option_of_java(newer, tmp_path) == ""


def test_archives_in_a_folder_with_a_blank_are_not_used(tools, tmp_path):
    """Spark's scripts split options at blanks, and Java would not start."""
    java, spark, _ = tools
    folder = tmp_path / "my files"
    for file in archive_files(java, spark, folder):
        file.parent.mkdir(exist_ok=True)
        file.touch()
    assert (archive_option(java, spark, folder), archive_option_of_java(java, folder)) == ("", "")


def test_program_that_fails_is_reported_and_leaves_no_archive_of_classes(tools, tmp_path):
    java, spark, write = tools
    write(spark.path / "bin/spark-submit", "#!/bin/sh\necho no memory >&2\nexit 4\n")
    with pytest.raises(EnvironmentLacks, match="spark-submit ended with 4: no memory"):
        make_archives(java, spark, tmp_path)
    assert archive_option(java, spark, tmp_path) == ""
