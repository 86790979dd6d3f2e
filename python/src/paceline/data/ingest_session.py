"""A local Spark session for ingest on one machine: loopback only, quiet, always ended."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from paceline.errors import DataError, EnvironmentLacks, UsageError
from paceline.host.spark import find_java_for_spark, use_python_of_spark

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

# The root logger stays at warn, or Spark prints that it changes the level to warn. The appender
# passes only fatal messages: failed jobs reach us as exceptions, with their cause.
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


@contextmanager
def local_session(cores: int, driver_memory: str = "1g") -> Iterator[SparkSession]:
    """Yield a `local[cores]` session; it and its JVM are ended when the block ends in any way.

    It listens on 127.0.0.1 only, with authentication and without the web page, and prints neither
    warnings nor progress. Raises EnvironmentLacks if Java is missing or Spark does not start.
    """
    use_python_of_spark()
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
        with _interrupt_handler_kept():
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
    """Turn the Java exceptions of failed Spark jobs into errors for the user.

    A DataError raised inside a task becomes a DataError with the same message.
    """
    from py4j.protocol import Py4JError  # noqa: PLC0415

    try:
        yield
    except Py4JError as error:
        text = str(error)
        in_task = re.search(r"paceline\.errors\.DataError: (.+)", text)
        if in_task:
            raise DataError(in_task.group(1)) from None
        causes = re.findall(r"Caused by: (.+)", text) or [text.strip().splitlines()[-1]]
        raise EnvironmentLacks(
            f"a Spark job of the ingest failed: {causes[-1]}; expected room on the disk and in "
            "memory, and images that all executors can read"
        ) from error


@contextmanager
def _interrupt_handler_kept() -> Iterator[None]:
    """Restore the handler of SIGINT at the end.

    PySpark replaces it by one that needs a running context, and leaves that in place when the
    context has ended: an interrupt would then raise AttributeError.
    """
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, before)


def _end_jvm(gateway: object) -> None:
    """End the JVM and wait for it: PySpark leaves it running until Python exits."""
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
    """Set variables for the JVM and the Python workers, and restore them afterwards."""
    wanted = {
        "JAVA_HOME": str(find_java_for_spark().path.resolve().parent.parent),
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_LOCAL_DIRS": scratch,
        # Our logging, and no settings that are meant for a cluster.
        "SPARK_CONF_DIR": scratch,
        # Otherwise petastorm and pyarrow print deprecations when each task imports them.
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
