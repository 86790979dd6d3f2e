"""A remote folder for copies of local files: in HDFS through Hadoop's own client, else pyarrow.

Hadoop's client is in Spark's jars, and reads the configuration of the site. So HDFS needs no native
library here. Importing this module imports no pyarrow, which an installation without extras lacks.
"""

from __future__ import annotations

import math
import re
import subprocess
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from paceline.base.errors import EnvironmentLacks
from paceline.base.host.files import hadoop_fs
from paceline.base.host.messages import kerberos_advice
from paceline.base.host.programs import why_it_failed

_LIMIT_S = 1800.0  # gigabytes over a slow network
_ABSENT = re.compile(r"^ls: .*: No such file or directory$", re.MULTILINE)


class RemoteFolder(Protocol):
    """A remote folder that belongs to one local folder. All methods raise EnvironmentLacks."""

    def make(self) -> None:
        """Make the folder and its parents, as far as they do not exist."""
        ...

    def add(self, folder: Path) -> None:
        """Copy the content of a local folder into it."""
        ...

    def replace(self, folder: Path) -> None:
        """Replace its content by that of a local folder."""
        ...

    def names(self) -> set[str]:
        """Return the names of what is in it; none if it does not exist."""
        ...

    def fetch(self, folder: Path) -> None:
        """Copy its content, if it exists, into a new local folder."""
        ...


def remote_folder(url: str, until_s: float = math.inf) -> RemoteFolder:
    """Return the folder that a URL names: hdfs://, s3:// or gs://.

    until_s: what time.monotonic() says when `names` and `fetch` have to end; one request to an
    object store may take a minute longer. Raises UsageError for another scheme.
    """
    if url.startswith("hdfs://"):
        return HadoopFolder(url.rstrip("/"), until_s)
    from paceline.train.data.location import location_of  # noqa: PLC0415  (pyarrow)

    return replace(location_of(url), until_s=until_s)


def make_new(url: str) -> None:
    """Make a remote folder and its parents. Raises UsageError if it is not empty."""
    folder = remote_folder(url)
    if folder.names():
        from paceline.train.data.location import not_empty  # noqa: PLC0415  (pyarrow)

        raise not_empty(url)
    folder.make()


def url_below(url: str, *names: str) -> str:
    """Return the URL of a folder below another one, with the same options."""
    place, mark, options = url.partition("?")
    return "/".join([place.rstrip("/"), *names]) + mark + options


@dataclass(frozen=True, slots=True)
class HadoopFolder:
    """A folder in HDFS, through `hadoop fs`. Each call starts a JVM, which takes seconds."""

    url: str
    until_s: float = math.inf

    def make(self) -> None:
        self._call("-mkdir", "-p", self.url)

    def add(self, folder: Path) -> None:
        # Hadoop reads local names as URLs, in which the path of the folder may be wrong.
        names = sorted(path.name for path in folder.iterdir())
        self._call("-put", *names, self.url, folder=folder)

    def replace(self, folder: Path) -> None:
        self._call("-rm", "-r", "-f", "-skipTrash", f"{self.url}/*")
        self.add(folder)

    def names(self) -> set[str]:
        ended = self._ended("-ls", "-C", self.url)
        if ended.returncode != 0 and _ABSENT.search(ended.stderr):
            return set()
        listed = self._output(ended)
        return {line.rpartition("/")[2] for line in listed.splitlines() if "/" in line}

    def fetch(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        urls = [f"{self.url}/{name}" for name in sorted(self.names())]
        if urls:
            self._call("-get", *urls, ".", folder=folder)

    def _call(self, *words: str, folder: Path | None = None) -> None:
        self._output(self._ended(*words, folder=folder))

    def _ended(self, *words: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
        limit_s = min(_LIMIT_S, max(0.0, self.until_s - time.monotonic()))
        try:
            return subprocess.run(
                [*hadoop_fs(), *words],
                cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                timeout=limit_s, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise self._failed(f"no answer within {limit_s:.0f} s") from error

    def _output(self, ended: subprocess.CompletedProcess[str]) -> str:
        if ended.returncode != 0:
            raise self._failed(why_it_failed(ended))
        return ended.stdout

    def _failed(self, why: str) -> EnvironmentLacks:
        advice = kerberos_advice(why) or (
            "check the address, the rights of the user (HADOOP_USER_NAME or a Kerberos ticket) and "
            "the configuration in HADOOP_CONF_DIR"
        )
        return EnvironmentLacks(f"{self.url}: cannot be used ({why}); {advice}")
