"""The environment of programs under test."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

# A JVM of a test lives for seconds. With its first compiler alone it takes half the CPU time
# (measured: 16 s and 8 s for an ingest of 24 images).
_QUICK = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:-UsePerfData"
QUICK_JVM = {
    "SPARK_LAUNCHER_OPTS": _QUICK,
    "SPARK_SUBMIT_OPTS": _QUICK,
    "SPARK_DAEMON_JAVA_OPTS": _QUICK,
}
# mpirun refuses root without them.
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def kept_environment(**variables: str) -> dict[str, str]:
    """Return the variables that are independent of the user's own runs, and others."""
    own = ("PACELINE_", "OMP_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    return {**kept, **variables}


def class_archive_options(folder: Path) -> str:
    """Return JVM options that use the class archives in `folder`; a missing archive is ignored."""
    base, spark = folder / "base.jsa", folder / "spark.jsa"
    return f"-Xlog:disable -XX:SharedArchiveFile={base}:{spark}"


def make_class_archives(folder: Path) -> None:
    """Put the archives of loaded classes that belong to this environment into `folder`.

    They are made if `pacelinew` did not. Other workers wait for the lock, and a JVM that starts
    meanwhile does without the archives.
    """
    from paceline.base.host.spark import find_java, find_spark
    from paceline.runner.launchers.spark.class_archive import archive_files, make_archives

    base, spark = folder / "base.jsa", folder / "spark.jsa"
    with (folder / "class-archives.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if spark.exists():
            return
        tools = find_java(), find_spark()
        made = archive_files(*tools)
        if not all(file.exists() for file in made):
            make_archives(*tools, folder)
            made = archive_files(*tools, folder)
        base.symlink_to(made[0])
        spark.symlink_to(made[1])
