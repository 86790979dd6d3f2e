"""Files that are files, and programs that copy them to and from remote places.

A pipe or a device in the place of a file would be read for ever.
"""

from __future__ import annotations

import errno
import os
import shlex
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from paceline.base.host.spark import QUICK_JVM, find_java, find_spark

_MOST_BYTES = 64 * 2**20  # of a file with Python or TOML


def regular_bytes(path: Path) -> bytes:
    """Return the content of a file that a person wrote. Raises OSError for another kind of file,
    and for one that is too large."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_size > _MOST_BYTES:
        os.close(descriptor)
        is_file = stat.S_ISREG(found.st_mode)
        most = f"expected at most {_MOST_BYTES >> 20} MiB"
        what = most if is_file else "expected a file, got a folder, a pipe or a device"
        raise OSError(errno.EFBIG if is_file else errno.EINVAL, what, str(path))
    with os.fdopen(descriptor, "rb") as file:
        return file.read()


def irregular_file(folder: Path, unread: str) -> Path | None:
    """Return a pipe, a device or a socket below a folder, or a link to one; None without any.

    unread: name of folders whose files are not read.
    """
    for place, folders, names in os.walk(folder):
        if unread in folders:
            folders.remove(unread)
        for name in names:
            path = Path(place, name)
            try:
                mode = path.stat().st_mode
            except OSError:
                continue  # a link that leads nowhere: its reader says so
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                return path
    return None


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
