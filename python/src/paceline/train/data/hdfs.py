"""HDFS as a file system of pyarrow, through Hadoop's native library."""

from __future__ import annotations

import threading

from pyarrow import fs

_CONNECT_S = 60.0


def native_hdfs(host: str) -> fs.FileSystem:
    """Connect through libhdfs. Raises OSError, also if there is no connection after a minute.

    host: of the NameNode, with its RPC port. Hadoop's own limits add up to many minutes.
    """
    ended: list[fs.FileSystem | Exception] = []

    def connect() -> None:
        try:
            ended.append(fs.HadoopFileSystem.from_uri(f"hdfs://{host}"))
        except Exception as error:  # noqa: BLE001  (it is raised again below)
            ended.append(error)

    # A daemon thread, because the call cannot be interrupted.
    thread = threading.Thread(target=connect, name="paceline-hdfs", daemon=True)
    thread.start()
    thread.join(_CONNECT_S)
    if not ended:
        raise OSError(f"no connection within {_CONNECT_S:g} s")
    if isinstance(ended[0], Exception):
        raise ended[0]
    return ended[0]
