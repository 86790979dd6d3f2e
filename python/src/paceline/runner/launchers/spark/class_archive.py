"""A class-data archive for the JVMs of Spark, made once at set-up.

Most of Spark's start is loading and verifying thousands of classes. The JVM can map them from an
archive instead (application class-data sharing: JEP 310 and 350). The Java wheel has no archive of
its own classes, so there are two: one of Java's classes, and on top of it one of those that a small
Spark job loads. A JVM that finds an archive of another Java or other jars ignores it.

    python -m paceline.runner.launchers.spark.class_archive     make the archives, about 10 s
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from paceline.base.errors import EnvironmentLacks, PacelineError
from paceline.base.host.programs import SAFE_PATH_VARIABLE, Tool, how_it_ended
from paceline.base.host.spark import COLLECTOR, find_java_for_spark, find_spark, homes

_LIMIT_S = 180.0
_JOB = "job"  # argument with which spark-submit runs this file


def archive_option(java: Tool, spark: Tool, folder: Path | None = None) -> str:
    """Return the option of the JVM that uses the archives; empty if they do not exist."""
    base, classes = archive_files(java, spark, folder)
    if not (_is_usable(base) and _is_usable(classes)):
        return ""
    # A class path with further jars would give two lines of warnings in each log.
    return f"-XX:SharedArchiveFile={base}:{classes} -Xlog:cds*=error"


def archive_option_of_java(java: Tool, folder: Path | None = None) -> str:
    """Return the option for a JVM that runs little of Spark; empty if there is no archive."""
    base = _archive_of_java(java, folder)
    return f"-XX:SharedArchiveFile={base}" if _is_usable(base) else ""


def _is_usable(archive: Path) -> bool:
    # Spark's scripts split options at blanks.
    return archive.is_file() and len(str(archive).split()) == 1


def archive_files(java: Tool, spark: Tool, folder: Path | None = None) -> tuple[Path, Path]:
    """Return the paths of the archive of Java's classes and of that of Spark's.

    folder: default is in the environment of this Python.
    """
    base = _archive_of_java(java, folder)
    return base, base.with_name(f"spark-{spark.version}-{base.name}")


def _archive_of_java(java: Tool, folder: Path | None) -> Path:
    place = Path(sys.prefix) / "share" / "paceline" / "java" if folder is None else folder
    return place / f"java-{java.version}.jsa"


def make_archives(java: Tool, spark: Tool, folder: Path | None = None) -> None:
    """Make both archives; existing ones are replaced.

    Raises EnvironmentLacks if Java or Spark fails or takes too long.
    """
    base, classes = archive_files(java, spark, folder)
    base.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=base.parent) as made:
        part = Path(made) / "part.jsa"
        _run([java.path, "-Xshare:dump", f"-XX:SharedArchiveFile={part}", COLLECTOR])
        part.replace(base)
        options = f"-XX:SharedArchiveFile={base} -XX:ArchiveClassesAtExit={part} {COLLECTOR}"
        _run(
            [
                spark.path / "bin" / "spark-submit", "--master", "local[2]",
                "--conf", "spark.ui.enabled=false", "--conf", "spark.authenticate=true",
                "--conf", "spark.driver.host=127.0.0.1",
                "--conf", "spark.driver.bindAddress=127.0.0.1",
                "--conf", f"spark.driver.extraJavaOptions={options}", __file__, _JOB,
            ],
            **homes(java, spark),
            SPARK_LOCAL_IP="127.0.0.1",
            PYSPARK_PYTHON=sys.executable,
            **{SAFE_PATH_VARIABLE: "1"},
        )  # fmt: skip
        part.replace(classes)


def _run(words: list[str | Path], **variables: str) -> None:
    command = [str(word) for word in words]
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise EnvironmentLacks(
            f"{command[0]} did not end within {_LIMIT_S:g} s; try again on an idle machine"
        ) from error
    if done.returncode != 0:
        raise EnvironmentLacks(f"{command[0]} {how_it_ended(done)}")


def _run_job() -> None:
    """Run one barrier stage of two tasks, so that Java archives the classes that it loads."""
    from pyspark.sql import SparkSession  # noqa: PLC0415  (only here)

    session = SparkSession.builder.getOrCreate()
    session.sparkContext.parallelize(range(2), 2).barrier().mapPartitions(list).collect()
    session.stop()


def main() -> int:
    """Make the archives of the Java and the Spark in use, or run the job for it."""
    if sys.argv[1:] == [_JOB]:
        _run_job()
        return 0
    try:
        make_archives(find_java_for_spark(), find_spark())
    except PacelineError as error:
        print(f"paceline: no class-data archive for Spark: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
