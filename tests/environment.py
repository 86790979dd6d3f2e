"""The environment of programs under test."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

# A JVM of a test lives for seconds. With its first compiler alone it takes half the CPU time
# (measured: 16 s and 8 s for an ingest of 24 images).
_QUICK = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:-UsePerfData"
QUICK_JVM = {
    "SPARK_LAUNCHER_OPTS": _QUICK,
    "SPARK_SUBMIT_OPTS": _QUICK,
    "SPARK_DAEMON_JAVA_OPTS": _QUICK,
}


_ARCHIVED_APPLICATION = Path(__file__).parent / "programs" / "barrier_stage.py"
_ARCHIVE_LIMIT_S = 120.0


def is_kept(variable: str) -> bool:
    """Check if a variable is independent of the user's own runs."""
    return not variable.startswith(("PACELINE_", "OMP_"))


def class_archive_options(folder: Path) -> str:
    """Return JVM options that use the class archives in `folder`; a missing archive is ignored."""
    base, spark = folder / "base.jsa", folder / "spark.jsa"
    return f"-Xlog:disable -XX:SharedArchiveFile={base}:{spark}"


def make_class_archives(folder: Path) -> None:
    """Make archives of loaded classes, with which a Spark driver takes a third less CPU time.

    (Measured: 3.6 s and 2.4 s for a barrier stage of two tasks, 4 s to make them.) Other workers
    wait for the lock, and a JVM that starts meanwhile does without the archives.
    """
    from paceline.host.java import find_java
    from paceline.host.spark import find_spark

    base, spark = folder / "base.jsa", folder / "spark.jsa"
    with (folder / "class-archives.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if spark.exists():
            return
        java, home = find_java().path, find_spark().path
        _run([java, *_QUICK.split(), "-Xshare:dump", f"-XX:SharedArchiveFile={base}"], {})
        part = folder / "spark.part"
        options = f"{_QUICK} -XX:SharedArchiveFile={base} -XX:ArchiveClassesAtExit={part}"
        environment = {
            "JAVA_HOME": str(Path(java).parent.parent),
            "PYSPARK_PYTHON": sys.executable,
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_SUBMIT_OPTS": options,
        }
        master = ["--master", "local[2]", "--conf", "spark.ui.enabled=false"]
        _run([home / "bin" / "spark-submit", *master, _ARCHIVED_APPLICATION], environment)
        part.rename(spark)


def _run(words: list[object], environment: dict[str, str]) -> None:
    subprocess.run(
        list(map(str, words)),
        env={**os.environ, **environment},
        check=True,
        capture_output=True,
        timeout=_ARCHIVE_LIMIT_S,
    )
