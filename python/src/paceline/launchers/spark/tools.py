"""The Spark in use."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import EnvironmentLacks
from paceline.host.java import find_java
from paceline.host.tools import (
    Finding,
    Tool,
    package_folder,
    tool_finding,
)

if TYPE_CHECKING:
    from collections.abc import Mapping


def find_spark(environment: Mapping[str, str] = os.environ) -> Tool:
    """Return $SPARK_HOME, else the pyspark wheel; `path` is Spark's home directory.

    Raises EnvironmentLacks if there is none.
    """
    home = environment.get("SPARK_HOME")
    if home:
        path, why = Path(home), "$SPARK_HOME"
    else:
        wheel = package_folder("pyspark")
        if wheel is None:
            raise EnvironmentLacks(
                "Spark: expected $SPARK_HOME or the pyspark wheel, found neither; "
                "`pip install pyspark==3.5.9` brings it"
            )
        path, why = wheel, "pyspark wheel"
    if not (path / "bin" / "spark-submit").is_file():
        raise EnvironmentLacks(
            f"Spark: expected {path}/bin/spark-submit ({why}), found none; "
            "correct SPARK_HOME or unset it to use the pyspark wheel"
        )
    return Tool(path=path, version=_version(path), why=why)


def _version(home: Path) -> str:
    # `spark-submit --version` would start a JVM.
    for jar in (home / "jars").glob("spark-core_*.jar"):
        return jar.stem.rpartition("-")[2]
    raise EnvironmentLacks(f"Spark: expected {home}/jars/spark-core_*.jar, found none")


def checks() -> list[Finding]:
    """Return what `paceline doctor` shows about this launcher."""
    return [tool_finding("Java", find_java), tool_finding("Spark", find_spark)]
