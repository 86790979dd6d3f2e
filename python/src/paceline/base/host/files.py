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
from typing import BinaryIO, NamedTuple
from urllib.parse import urlsplit

_MOST_BYTES = 64 * 2**20  # of a file with Python or TOML
# A larger file whose content takes less than a thousandth of its size on the disk has none.
_HOLLOW_BYTES = 64 * 2**20
_HOLLOW_SHARE = 1000
_BLOCK_BYTES = 512  # man 2 stat
# What the kernel says about a path that leads to no file: a link to itself, a name below a file, a
# name that no file can have, a socket.
NO_FILE = (
    errno.EINVAL, errno.EISDIR, errno.ELOOP, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ENXIO,
)  # fmt: skip


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading. Raises OSError, with an error number of NO_FILE for a folder, a
    pipe, a device or a socket, and for a file that is large and has no content."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    found = os.fstat(descriptor)
    fault = None
    if not stat.S_ISREG(found.st_mode):
        fault = "expected a file, got a folder, a pipe or a device"
    elif found.st_size > max(_HOLLOW_BYTES, found.st_blocks * _BLOCK_BYTES * _HOLLOW_SHARE):
        fault = f"expected content, got a file of {found.st_size:.3g} bytes that has none"
    if fault is not None:
        os.close(descriptor)
        raise OSError(errno.EINVAL, fault, str(path))
    return os.fdopen(descriptor, "rb")


def regular_bytes(path: Path) -> bytes:
    """Return the content of a file that a person wrote. Raises OSError for another kind of file,
    and for one that is too large."""
    with open_regular(path) as file:
        content = file.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        most = f"expected at most {_MOST_BYTES >> 20} MiB"
        raise OSError(errno.EFBIG, most, str(path))
    return content


class OddFiles(NamedTuple):
    """The first file of each kind that a folder should not contain; None without any."""

    irregular: Path | None  # a pipe, a device or a socket, or a link to one
    link_out: Path | None  # a link that leads out of the folder


def odd_files(folder: Path, unread: str) -> OddFiles:
    """Return the odd files below a folder. unread: name of folders whose files are not read."""
    root = os.path.realpath(folder)
    irregular = link_out = None
    for place, folders, names in os.walk(folder):
        if unread in folders:
            folders.remove(unread)
        for name in (*folders, *names):
            path = Path(place, name)
            if link_out is None and path.is_symlink() and not _is_below(path, root):
                link_out = path
            if irregular is None and name not in folders and _is_irregular(path):
                irregular = path
    return OddFiles(irregular, link_out)


def _is_below(path: Path, root: str) -> bool:
    """Return whether a link leads to a place below a folder; one to itself is where it is."""
    return os.path.realpath(path).startswith(f"{root.rstrip('/')}/")


def _is_irregular(path: Path) -> bool:
    try:
        mode = path.stat().st_mode
    except OSError:
        return False  # a link that leads nowhere: its reader says so
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


_FETCH = {"s3": "aws s3 cp --recursive", "gs": "gcloud storage cp --recursive"}


def hadoop_fs(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return the command of `hadoop fs`, to which its options are added.

    That is the program of the site, else the class in Spark's jars. Raises EnvironmentLacks if
    there is neither Hadoop's program nor Java and Spark.
    """
    # a reader of records does not need what finds programs
    from paceline.base.host.spark import QUICK_JVM, find_java, find_spark  # noqa: PLC0415

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
