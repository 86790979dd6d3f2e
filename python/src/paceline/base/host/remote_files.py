"""Programs that copy files to and from remote places."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from paceline.base.host.spark import QUICK_JVM, find_java, find_spark

_FETCH = {"s3": "aws s3 cp --recursive", "gs": "gcloud storage cp --recursive"}


def hadoop_fs(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return the command of `hadoop fs`, to which its options are added.

    That is the program of the site, else the class in Spark's jars. Raises EnvironmentLacks if
    there is neither Hadoop's program nor Java and Spark.
    """
    own = shutil.which("hadoop", path=environment.get("PATH"))
    if own is not None:
        return [own, "fs"]
    folders = [str(find_spark(environment).path / "jars" / "*")]
    if configured := environment.get("HADOOP_CONF_DIR"):
        folders.insert(0, str(Path(configured).absolute()))
    java = str(find_java(environment).path)
    classes = ("-cp", os.pathsep.join(folders))
    return [java, *QUICK_JVM.split(), *classes, "org.apache.hadoop.fs.FsShell"]


def how_to_fetch(url: str) -> str:
    """Return the command that copies a remote folder into the current one.

    url: hdfs, s3 or gs. Raises EnvironmentLacks as `hadoop_fs` does.
    """
    place, _, _ = url.partition("?")
    parts = urlsplit(place)
    name = Path(parts.path).name or "."
    if parts.scheme in _FETCH:
        return f"{_FETCH[parts.scheme]} {shlex.quote(place)} {shlex.quote(name)}"
    return shlex.join([*hadoop_fs(), "-get", place, name])
