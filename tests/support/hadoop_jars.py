"""The jars of Hadoop's daemons, which Maven brings."""

from __future__ import annotations

import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

_POM = Path(__file__).resolve().parents[1] / "cluster" / "hadoop" / "pom.xml"
_FETCH_S = 300.0


@functools.cache
def class_path() -> str:
    """Return the jars in Maven's local repository, separated by colons; fetch those not yet there.

    Raises OSError or subprocess.SubprocessError if they cannot be had.
    """
    with tempfile.TemporaryDirectory(prefix="paceline-hadoop-") as folder:
        file = Path(folder, "class-path")
        subprocess.run(
            [
                _maven(), "--quiet", "--batch-mode", "--file", str(_POM),
                "dependency:build-classpath", f"-Dmdep.outputFile={file}",
            ],
            capture_output=True,
            timeout=_FETCH_S,
            check=True,
        )  # fmt: skip
        return file.read_text("utf-8").strip()


def _maven() -> str:
    found = shutil.which("mvn")
    if found is None:
        raise FileNotFoundError("not on PATH: mvn")
    return found


def why_not() -> str | None:
    """Return the reason why there are no jars, or no Java for them; None if there are."""
    if shutil.which("java") is None:
        return "not on PATH: java"
    try:
        class_path()
    except (OSError, subprocess.SubprocessError) as error:
        return f"no jars of Hadoop: {error}"
    return None


def are_in_local_repository() -> bool:
    """Return whether Maven has brought the daemons before."""
    folder = Path.home() / ".m2/repository/org/apache/hadoop/hadoop-client-minicluster"
    return shutil.which("mvn") is not None and any(folder.glob("*/*.jar"))
