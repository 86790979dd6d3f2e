"""HDFS as a file system of pyarrow: through Hadoop's native library, or over HTTP (WebHDFS).

Few installations of Python bring the library. The HTTP interface of the NameNode is on by default
(dfs.webhdfs.enabled), and HttpFS gateways have the same.
"""

from __future__ import annotations

import getpass
import os
import threading
from typing import Any

from pyarrow import fs

from paceline.data.hadoop_tokens import webhdfs_token
from paceline.errors import EnvironmentLacks

_CONNECT_S = 60.0
_HTTP_LIMITS_S = (5.0, 60.0)  # to connect, and without a byte
_HTTP_PORT = 9870  # dfs.namenode.http-address
_SWITCHES = ("kerberos", "use_https")


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


def web_hdfs(host: str, options: dict[str, str]) -> fs.FileSystem:
    """Return HDFS over HTTP; opens no connection.

    host: [USER@]HOST[:PORT] of the NameNode's web page or of an HttpFS gateway. options:
    `kerberos=true` (uses a delegation token, else a ticket, which needs requests_kerberos),
    `use_https=true`. Raises ValueError for others, EnvironmentLacks if a package is missing or the
    file of tokens cannot be read.
    """
    unknown = options.keys() - set(_SWITCHES)
    if unknown:
        raise ValueError(f"{min(unknown)}; the options are {', '.join(_SWITCHES)}")
    user, _, place = host.rpartition("@")
    name, _, port = place.partition(":")
    is_on = {switch: options.get(switch) == "true" for switch in _SWITCHES}
    identity = _identity(name, user, kerberos=is_on["kerberos"])
    try:
        from fsspec.implementations.webhdfs import WebHDFS  # noqa: PLC0415  (not always installed)

        # fsspec would return an earlier instance, with its user.
        files = WebHDFS(
            name, int(port or _HTTP_PORT), skip_instance_cache=True,
            use_https=is_on["use_https"], **identity,
        )  # fmt: skip
    except ImportError as error:
        raise EnvironmentLacks(
            f"webhdfs://{host}: expected the package {error.name}, found none; "
            f"`pip install {error.name}`"
        ) from error
    for scheme in ("http://", "https://"):
        files.session.mount(scheme, _limited_adapter())
    return fs.PyFileSystem(fs.FSSpecHandler(files))


def _identity(host: str, user: str, *, kerberos: bool) -> dict[str, object]:
    """Return the options of fsspec that say who asks the NameNode on a host."""
    if not kerberos:
        return {"user": user or os.environ.get("HADOOP_USER_NAME") or getpass.getuser()}
    token = webhdfs_token(host)
    return {"kerberos": True} if token is None else {"token": token}


def _limited_adapter() -> Any:
    """Return an adapter of requests with limits; fsspec sets none."""
    from requests.adapters import HTTPAdapter  # noqa: PLC0415  (with fsspec's WebHDFS)

    class Limited(HTTPAdapter):
        def send(self, request: Any, *values: Any, **options: Any) -> Any:
            options["timeout"] = options.get("timeout") or _HTTP_LIMITS_S
            return super().send(request, *values, **options)

    return Limited()
