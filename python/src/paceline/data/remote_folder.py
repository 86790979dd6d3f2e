"""A remote folder for a copy of local files: in HDFS through Hadoop's own client, else pyarrow.

Hadoop's client is in Spark's jars, and reads the configuration of the site. So HDFS needs no native
library here.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from paceline.data.location import location_of, not_empty
from paceline.errors import EnvironmentLacks
from paceline.host.programs import why_it_failed
from paceline.host.remote_files import hadoop_fs

_LIMIT_S = 1800.0  # gigabytes over a slow network


class RemoteFolder(Protocol):
    """A remote folder that belongs to one local folder."""

    def make(self) -> None:
        """Make the folder and its parents.

        Raises UsageError if it is not empty, EnvironmentLacks if it cannot be made.
        """
        ...

    def replace(self, folder: Path) -> None:
        """Replace its content by that of a local folder. Raises EnvironmentLacks."""
        ...


def remote_folder(url: str) -> RemoteFolder:
    """Return the folder that a URL names: hdfs://, webhdfs://, s3:// or gs://.

    Raises UsageError for another scheme.
    """
    return HadoopFolder(url.rstrip("/")) if url.startswith("hdfs://") else location_of(url)


@dataclass(frozen=True, slots=True)
class HadoopFolder:
    """A folder in HDFS, through `hadoop fs`."""

    url: str

    def make(self) -> None:
        self._call("-mkdir", "-p", self.url)
        if self._call("-ls", self.url).strip():
            raise not_empty(self.url)

    def replace(self, folder: Path) -> None:
        self._call("-rm", "-r", "-f", "-skipTrash", f"{self.url}/*")
        # Hadoop reads local names as URLs, in which the path of the folder may be wrong.
        names = sorted(path.name for path in folder.iterdir())
        self._call("-put", *names, self.url, folder=folder)

    def _call(self, *words: str, folder: Path | None = None) -> str:
        try:
            ended = subprocess.run(
                [*hadoop_fs(), *words],
                cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                timeout=_LIMIT_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise self._failed(f"no answer within {_LIMIT_S:g} s") from error
        if ended.returncode != 0:
            raise self._failed(why_it_failed(ended))
        return ended.stdout

    def _failed(self, why: str) -> EnvironmentLacks:
        return EnvironmentLacks(
            f"{self.url}: cannot be written ({why}); check the address, the rights of the user "
            "(HADOOP_USER_NAME or a Kerberos ticket) and the configuration in HADOOP_CONF_DIR"
        )
