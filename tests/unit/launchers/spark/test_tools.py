"""Which Spark is chosen when several exist."""

import pytest
from tests.unit.host.test_tools import program

from paceline.errors import EnvironmentLacks
from paceline.launchers.spark import tools


def test_spark_home_is_used_and_its_version_read_from_its_jars(tmp_path):
    program(tmp_path / "bin" / "spark-submit", "")
    (tmp_path / "jars").mkdir()
    (tmp_path / "jars" / "spark-core_2.12-3.4.1.jar").touch()
    found = tools.find_spark({"SPARK_HOME": str(tmp_path)})
    assert (found.path, found.version, found.why) == (tmp_path, "3.4.1", "$SPARK_HOME")


def test_spark_home_without_spark_is_refused(tmp_path):
    with pytest.raises(EnvironmentLacks, match="spark-submit"):
        tools.find_spark({"SPARK_HOME": str(tmp_path)})
