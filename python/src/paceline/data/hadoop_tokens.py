"""Delegation tokens of HDFS, which stand for a Kerberos ticket where there is none.

YARN writes those that Spark has asked for into a file of each container; `hdfs fetchdt` writes one
as well. The format is that of org.apache.hadoop.security.Credentials (Hadoop 3.3).
"""

from __future__ import annotations

import base64
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import EnvironmentLacks

TOKEN_FILE_VARIABLE = "HADOOP_TOKEN_FILE_LOCATION"  # noqa: S105  (a name)
_START = b"HDTS\0"
_KINDS = ("HDFS_DELEGATION_TOKEN", "WEBHDFS delegation", "SWEBHDFS delegation")


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    service: str  # ADDRESS:PORT of the NameNode, or ha-hdfs:NAME
    text: str  # as the parameter `delegation` of WebHDFS


def webhdfs_token(host: str, environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the token for the NameNode on a host, as WebHDFS takes it; None if there is none.

    The only token for HDFS is taken for every host: that of several NameNodes has no address.
    Raises EnvironmentLacks if the file of tokens cannot be read.
    """
    name = environment.get(TOKEN_FILE_VARIABLE)
    if not name:
        return None
    try:
        tokens = [token for token in _tokens(Path(name).read_bytes()) if token.kind in _KINDS]
    except (OSError, ValueError) as error:
        raise EnvironmentLacks(
            f"${TOKEN_FILE_VARIABLE}: expected a file with Hadoop's delegation tokens, got {name} "
            f"({error}); correct the variable, or unset it and use a ticket (kinit)"
        ) from error
    own = _addresses(host)
    matching = [token for token in tokens if token.service.rpartition(":")[0] in own]
    chosen = matching or (tokens if len(tokens) == 1 else [])
    return chosen[0].text if chosen else None


def _addresses(host: str) -> set[str]:
    try:
        return {host, *(str(found[4][0]) for found in socket.getaddrinfo(host, None))}
    except OSError:
        return {host}


def _tokens(content: bytes) -> Iterator[_Token]:
    if not content.startswith(_START):
        raise ValueError(f"it begins with {content[: len(_START)]!r}, not with {_START!r}")
    reader = _Reader(content, len(_START))
    for _ in range(reader.number()):
        reader.block()  # the name by which Hadoop finds it
        begin = reader.place
        reader.block()  # the identifier
        reader.block()  # the password
        kind, service = reader.block().decode(), reader.block().decode()
        text = base64.urlsafe_b64encode(content[begin : reader.place]).rstrip(b"=").decode()
        yield _Token(kind, service, text)


@dataclass(slots=True)
class _Reader:
    """Reads what Hadoop's WritableUtils and Text have written."""

    content: bytes
    place: int

    def number(self) -> int:
        """Return the next size; a first byte from 0x88 to 0x8f gives its number of bytes."""
        first = self._take(1)[0]
        if first < 0x80:
            return first
        if not 0x88 <= first <= 0x8F:
            raise ValueError(f"there is no size at byte {self.place - 1}")
        return int.from_bytes(self._take(0x90 - first), "big")

    def block(self) -> bytes:
        """Return the next bytes, before which their size stands."""
        return self._take(self.number())

    def _take(self, size: int) -> bytes:
        self.place += size
        taken = self.content[self.place - size : self.place]
        if len(taken) < size:
            raise ValueError(f"it ends at byte {len(self.content)}, within a token")
        return taken
