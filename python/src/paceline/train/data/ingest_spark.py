"""Spark for an ingest: a session on one machine, progress of its jobs, and the place of the result.

The session is on loopback only, quiet, and always ended.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeVar, cast

from paceline.base.errors import DataError, EnvironmentLacks, UsageError
from paceline.base.host.processes import kill_until_gone, pids_with_variable, send
from paceline.base.host.programs import SAFE_PATH_VARIABLE
from paceline.base.host.spark import find_java_for_spark, find_spark, homes, use_python_of_spark
from paceline.plan.spec.values import local_path
from paceline.train.data.location import made_folder, not_empty, require_new
from paceline.train.data.manifest import MANIFEST_NAME

if TYPE_CHECKING:
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
# With less, Parquet's writers of all cores would divide row groups to fit into the memory.
_MIB_PER_CORE, _LEAST_MIB = 128, 1024
_POLL_S = 0.25
_POLLING_END_S = 5.0

T = TypeVar("T")


@contextmanager
def local_session(cores: int) -> Iterator[SparkSession]:
    """Yield a `local[cores]` session; it and its JVM are ended when the block ends in any way.

    It listens on 127.0.0.1 only, with authentication and without the web page, and prints neither
    warnings nor progress. Raises EnvironmentLacks if Java is missing or Spark does not start.
    """
    use_python_of_spark()
    from pyspark import SparkContext  # noqa: PLC0415  (a second to import; ingest only)
    from pyspark.sql import SparkSession  # noqa: PLC0415

    if SparkSession.getActiveSession() is not None:
        raise UsageError("a Spark session is active in this process: pass it to ingest as `spark`")
    with (
        TemporaryDirectory(prefix="paceline-spark-") as scratch,
        _environment(scratch),
        _py4j_silenced(),
    ):
        builder = (
            SparkSession.builder.master(f"local[{cores}]")
            .appName("paceline ingest")
            .config("spark.driver.memory", f"{max(_LEAST_MIB, cores * _MIB_PER_CORE)}m")
            .config("spark.driver.host", "127.0.0.1")
            .config("spark.driver.bindAddress", "127.0.0.1")
            .config("spark.authenticate", "true")
            .config("spark.ui.enabled", "false")
            .config("spark.ui.showConsoleProgress", "false")
            .config("spark.local.dir", scratch)
            .config("spark.sql.warehouse.dir", str(Path(scratch, "warehouse")))
        )
        session = None
        try:
            with _interrupt_handler_kept():
                try:
                    session = builder.getOrCreate()
                except Exception as error:
                    raise EnvironmentLacks(
                        f"Spark did not start (Java: {os.environ['JAVA_HOME']}): {error}"
                    ) from error
            _silence_accumulators(session)
            yield session
        except (KeyboardInterrupt, SystemExit):
            _end_workers(SparkContext._gateway, scratch)  # noqa: SLF001
            raise
        finally:
            gateway = SparkContext._gateway  # noqa: SLF001  (the only handle of the JVM)
            try:
                if session is not None:
                    _stop(session)
            finally:
                _end_jvm(gateway)
                SparkContext._gateway = SparkContext._jvm = None  # noqa: SLF001


def _silence_accumulators(session: SparkSession) -> None:
    """Let PySpark's server of accumulators print no stack trace when the JVM ends before it."""
    server = cast(Any, session.sparkContext)._accumulatorServer  # noqa: SLF001
    server.handle_error = lambda *_: None


def _stop(session: SparkSession) -> None:
    """Stop the session, from another thread.

    A signal may have left a call of this thread. The JVM would answer its next one after the end of
    the Spark job.
    """
    from py4j.protocol import Py4JError  # noqa: PLC0415

    def stop() -> None:
        # the JVM may have ended before, by a signal to the whole process group
        with suppress(Py4JError, OSError):
            session.stop()

    thread = threading.Thread(target=stop, name="paceline-spark-stop", daemon=True)
    thread.start()
    thread.join(_JVM_END_S)


def _end_workers(gateway: Any, scratch: str) -> None:
    """Kill the Python workers, which would print stack traces when the JVM leaves them."""
    jvm = set() if gateway is None or gateway.proc is None else {gateway.proc.pid}
    send(pids_with_variable("SPARK_CONF_DIR", scratch) - jvm, signal.SIGKILL)


def counted(counter: Any, items: Iterable[T]) -> Iterator[T]:
    """Pass `items` on and add 1 to a Spark accumulator for each."""
    for item in items:
        counter.add(1)
        yield item


@contextmanager
def reported(
    spark: SparkSession, total: int, progress: Callable[[int, int], None] | None
) -> Iterator[Any]:
    """Yield a Spark accumulator whose growth a thread reports while the block runs.

    The last report is (total, total) if the block ends without an exception.
    """
    counter = spark.sparkContext.accumulator(0)
    if progress is None:
        yield counter
        return
    ended = threading.Event()

    def poll() -> None:
        shown = 0
        while not ended.wait(_POLL_S):
            # A task that ran twice counts twice, so the sum may exceed the total.
            done = min(int(counter.value), total - 1)
            if done > shown:
                progress(done, total)
                shown = done

    thread = threading.Thread(target=poll, name="paceline-ingest-progress", daemon=True)
    thread.start()
    try:
        yield counter
    finally:
        ended.set()
        thread.join(_POLLING_END_S)
    progress(total, total)


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
        name = f"{DataError.__module__}.{DataError.__qualname__}"  # as Python's trace prints it
        in_task = re.search(rf"{re.escape(name)}: (.+)", text)
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


@contextmanager
def _py4j_silenced() -> Iterator[None]:
    """Drop what py4j logs: it prints the stack trace of every interrupt and lost connection."""

    def is_of_another(record: logging.LogRecord) -> bool:
        return "py4j" not in Path(record.pathname).parts

    logging.root.addFilter(is_of_another)
    try:
        yield
    finally:
        logging.root.removeFilter(is_of_another)


def _end_jvm(gateway: Any) -> None:
    """End the JVM and wait for it: PySpark leaves it running until Python exits."""
    if gateway is None or gateway.proc is None:  # its start was interrupted, or it is not ours
        return
    gateway.shutdown()
    with suppress(OSError):  # it has ended
        gateway.proc.stdin.close()  # the JVM exits when its standard input closes
    try:
        gateway.proc.wait(_JVM_END_S)
    except subprocess.TimeoutExpired:
        gateway.proc.kill()
        gateway.proc.wait(_JVM_END_S)


@contextmanager
def _environment(scratch: str) -> Iterator[None]:
    """Set variables for the JVM and the Python workers, and restore them afterwards."""
    wanted = {
        **homes(find_java_for_spark(), find_spark()),
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        SAFE_PATH_VARIABLE: "1",
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
        # a JVM whose start was interrupted would go on, and complain about removed files
        kill_until_gone(lambda: pids_with_variable("SPARK_CONF_DIR", scratch), _JVM_END_S)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _classes_of_hadoop() -> Iterator[None]:
    """Raise EnvironmentLacks if the JVM is out of reach, as with Spark Connect, or denies them."""
    from py4j.protocol import Py4JError, Py4JJavaError  # noqa: PLC0415

    try:
        yield
    except Py4JJavaError:  # the file system's own error
        raise
    except (AttributeError, NotImplementedError, Py4JError) as error:
        raise EnvironmentLacks(
            "the ingest writes with the classes of Hadoop in Spark's JVM, and this Spark does not "
            f"give access to them ({type(error).__name__}); Spark Connect, serverless and shared "
            "clusters of managed Spark do not. Use a cluster with classic access, or `paceline "
            "data ingest` on one machine"
        ) from error


class NewDataset:
    """The place of a new data set, which appears there complete or not at all.

    The data set is written beside it under a temporary name and then renamed. Hadoop's classes in
    the driver's JVM do that on every file system that Spark knows.
    """

    def __init__(self, spark: SparkSession, out_dataset: str | Path) -> None:
        """Raises UsageError if the place exists and is not empty."""
        text = str(out_dataset)
        self._folder = local_path(out_dataset) if is_folder(text) else None
        parent, _, name = text.rstrip("/").rpartition("/")
        if self._folder is not None:
            parent, name = f"file://{self._folder.parent}", self._folder.name
        self.partial_url = f"{parent}/.{name}.partial-{uuid.uuid4().hex[:8]}"
        with _classes_of_hadoop():
            jvm = cast(Any, spark.sparkContext._jvm)  # noqa: SLF001  (PySpark has no file API)
            context: Any = spark.sparkContext._jsc  # noqa: SLF001
            self._path = jvm.org.apache.hadoop.fs.Path
            self._final = self._path(f"{parent}/{name}")
            self._partial = self._path(self.partial_url)
            self._files = self._final.getFileSystem(context.hadoopConfiguration())
        self._files.setWriteChecksum(False)  # the manifest contains checksums
        if self._files.exists(self._final) and len(self._files.listStatus(self._final)) > 0:
            raise not_empty(text)

    def write_manifest(self, document: Mapping[str, Any]) -> None:
        """Write the manifest into the temporary data set."""
        self._files.delete(self._path(self._partial, "_SUCCESS"), False)  # written by Spark
        self.write(MANIFEST_NAME, json.dumps(document, indent=1).encode())

    def write(self, name: str, content: bytes) -> None:
        """Write a small file into the temporary data set."""
        with closing(self._files.create(self._path(self._partial, name), True)) as stream:
            stream.write(bytearray(content))

    def commit(self) -> None:
        """Rename the temporary data set to its final name."""
        # Renaming onto an existing folder would move the data set into it.
        if self._files.exists(self._final):
            self._files.delete(self._final, False)
        if not self._files.rename(self._partial, self._final):
            raise DataError(f"{self.partial_url}: cannot be renamed to {self._final}")

    @contextmanager
    def discarded_on_failure(self) -> Iterator[None]:
        """Remove the temporary data set if the block fails."""
        try:
            yield
        except BaseException:
            with spark_failures():
                self._discard()
            raise

    def _discard(self) -> None:
        """Remove the temporary data set if it exists."""
        if self._folder is None:
            self._files.delete(self._partial, True)
        else:  # works without the JVM, too, which may be what failed
            partial = self._folder.parent / self.partial_url.rpartition("/")[2]
            shutil.rmtree(partial, ignore_errors=True)


def prepare_place(out_dataset: str | Path, *, is_local_session: bool) -> None:
    """Check the place of a new data set before Spark starts; make the parents of a folder.

    Raises UsageError if it is not empty or out of reach of a local session, EnvironmentLacks if it
    cannot be made.
    """
    text = str(out_dataset)
    if not is_folder(text):
        if is_local_session:
            raise UsageError(
                f"{text}: expected a local folder or a file:// URL; spark-jobs/ingest.py writes to "
                "the storage of a cluster"
            )
        return
    folder = local_path(out_dataset)
    require_new(folder)
    made_folder(folder.parent)


def is_folder(name: str) -> bool:
    """Return whether the name is a path or a file:// URL."""
    return "://" not in name or name.startswith("file://")
