"""`python -m paceline.runner.launchers.spark.mpi_agent HOST COMMAND…`, called in place of ssh.

mpirun calls it. It passes the start of PRRTE's daemon to the barrier task that leads HOST, and
lives as long as the daemon, but no longer than mpirun. Its exit status is the daemon's.

Tasks and agents exchange lines of JSON over TCP. Each carries a code (HMAC, RFC 2104) of its text,
of a number that the accepting side chose for this connection, and of the token of the stage, which
Spark sends with the tasks. So a program that reads the network can neither speak for a task nor
repeat a message. The module needs little besides the standard library, so that it starts quickly.
"""

from __future__ import annotations

import hmac
import json
import os
import re
import secrets
import shlex
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from paceline.base.errors import EnvironmentLacks, PacelineError, TimedOut, UsageError
from paceline.base.host.processes import die_with_parent

# Task 0 sets it for mpirun: {"leaders": {HOST: [address, port]}, "token": .., "limit_s": ..}
AGENT_VARIABLE = "PACELINE_SPARK_AGENT"
DAEMON = "prted"
_START_LIMIT_S = 20.0
# Variables with which an Open MPI that was moved finds its own files.
PREFIXES = ("PRTE_PREFIX", "PMIX_PREFIX", "OPAL_PREFIX", "LD_LIBRARY_PATH")

Message = dict[str, Any]
# A program that connects and sends nothing delays the next peer by at most this time.
_HELLO_LIMIT_S = 2.0
# A daemon's command line is 1 to 2 kB, the end of its output at most 4 kB.
_LONGEST_LINE_BYTES = 1 << 20
_RETRY_S = 0.1


@dataclass(frozen=True, slots=True)
class DaemonStart:
    """The start of PRRTE's daemon on another host, as mpirun asks for it.

    The program is no part of it: each host starts its own daemon and nothing else.
    """

    arguments: tuple[str, ...]
    variables: tuple[str, ...]  # those of PREFIXES that mpirun's shell command sets first


def read_command(words: Sequence[str]) -> DaemonStart:
    """Read the command for ssh: settings of variables, `prted`, its arguments.

    mpirun writes it for a shell, but no shell runs it: only the daemon and its arguments are used.
    Raises UsageError if it does not start a prted.
    """
    parts = shlex.split(" ".join(words))
    for number, part in enumerate(parts):
        program = part.rpartition(";")[2]
        if program.rpartition("/")[2] == DAEMON:
            before = " ".join([*parts[:number], part.removesuffix(program)])
            return DaemonStart(
                arguments=tuple(parts[number + 1 :]),
                variables=tuple(name for name in PREFIXES if re.search(rf"\b{name}\b", before)),
            )
    raise UsageError(
        f"expected mpirun to start {DAEMON} on another host, got: {' '.join(words)[:300]}; "
        "inside Spark, Open MPI 5 with its own PRRTE is needed"
    )


def main(words: Sequence[str]) -> int:
    """Have the daemon started on the host `words[0]`; return its exit status."""
    try:
        settings = json.loads(os.environ[AGENT_VARIABLE])
        start = asdict(read_command(words[1:]))
        host, port = settings["leaders"][words[0]]
        with connect((host, port), settings["token"], start, _START_LIMIT_S) as leader:
            end = leader.receive(settings["limit_s"])
    except PacelineError as error:
        print(f"paceline: {error}", file=sys.stderr)
        return int(error.exit_code)
    except (KeyError, IndexError) as error:
        print(f"paceline: no barrier task for {words[:1]} ({error!r})", file=sys.stderr)
        return 2
    if end is None:
        print(f"paceline: the barrier task on {words[0]} has ended", file=sys.stderr)
        return 1
    if end["output"]:
        print(f"paceline: {DAEMON} on {words[0]}: {end['output']}", file=sys.stderr)
    return int(end["status"])


def new_token() -> str:
    """Return a secret by which the tasks of one job recognise each other."""
    return secrets.token_hex(16)


class Peer:
    """A connection to another process of the stage."""

    def __init__(
        self, connection: socket.socket, token: str, nonce: str, *, accepted: bool
    ) -> None:
        """nonce: the number of this connection. accepted: this side has chosen it."""
        self._connection = connection
        self._key = f"{token} {nonce}".encode()
        self._accepted = accepted

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        self._connection.close()

    def send(self, message: Message) -> None:
        text = json.dumps(message)
        code = self._code(text, of_accepting=self._accepted)
        self._connection.sendall(json.dumps({"text": text, "code": code}).encode() + b"\n")

    def receive(self, limit_s: float) -> Message | None:
        """Return the next message; None if the peer has closed or sent something else.

        Raises TimedOut after `limit_s`.
        """
        line = _object(_read_line(self._connection, limit_s))
        text, code = (line or {}).get("text"), (line or {}).get("code")
        if not (isinstance(text, str) and isinstance(code, str) and code.isascii()):
            return None
        if not hmac.compare_digest(code, self._code(text, of_accepting=not self._accepted)):
            return None
        return _object(text.encode())

    def has_ended(self, limit_s: float) -> bool:
        """Wait for a peer that sends nothing more to close; False if it has not by `limit_s`."""
        self._connection.settimeout(max(limit_s, 0.001))
        try:
            while self._connection.recv(1024):
                pass
        except TimeoutError:
            return False
        except OSError:
            return True
        return True

    def _code(self, text: str, *, of_accepting: bool) -> str:
        sender = "accepting" if of_accepting else "connecting"
        return hmac.new(self._key, f"{sender} {text}".encode(), "sha256").hexdigest()


def _read_line(connection: socket.socket, limit_s: float) -> bytes:
    """Return the next line, empty at the end. Raises TimedOut after `limit_s`."""
    connection.settimeout(max(limit_s, 0.001))
    # Unbuffered: bytes after the line stay in the socket for the next call.
    try:
        with connection.makefile("rb", buffering=0) as lines:
            return lines.readline(_LONGEST_LINE_BYTES)
    except TimeoutError as error:
        raise TimedOut(f"no answer within {limit_s:g} s") from error
    except OSError:
        return b""


def _object(line: bytes) -> Message | None:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):  # also nested too deeply
        return None
    return message if isinstance(message, dict) else None


def connect(address: tuple[str, int], token: str, hello: Message, limit_s: float) -> Peer:
    """Connect and send `hello`.

    Raises EnvironmentLacks if nobody answers within `limit_s`.
    """
    deadline = time.monotonic() + limit_s
    while True:
        left_s = max(deadline - time.monotonic(), 0.001)
        try:
            return _greeted(socket.create_connection(address, timeout=left_s), token, hello, left_s)
        except (OSError, TimedOut) as error:
            if time.monotonic() + _RETRY_S < deadline:
                time.sleep(_RETRY_S)
                continue
            raise EnvironmentLacks(
                f"{address[0]}:{address[1]}: expected a barrier task of this job to answer "
                f"({error}); the hosts must reach one another over the interface of [network] "
                "interface, on any port"
            ) from error


def _greeted(connection: socket.socket, token: str, hello: Message, limit_s: float) -> Peer:
    """Wait until the other side accepts, and send `hello`. Raises OSError or TimedOut."""
    try:
        nonce = _nonce_of(_object(_read_line(connection, limit_s)))
        peer = Peer(connection, token, nonce, accepted=False)
        peer.send(hello)
    except BaseException:
        connection.close()
        raise
    return peer


def _nonce_of(message: Message | None) -> str:
    if message is None or not isinstance(nonce := message.get("nonce"), str):
        raise ConnectionError("the other side closed the connection or is no barrier task")
    return nonce


def accept(listener: socket.socket, token: str, limit_s: float) -> tuple[Peer, Message] | None:
    """Return the next peer that knows the token, with its hello; None after `limit_s`."""
    deadline = time.monotonic() + limit_s
    while (left_s := deadline - time.monotonic()) > 0:
        listener.settimeout(left_s)
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            return None
        nonce = secrets.token_hex(16)
        peer = Peer(connection, token, nonce, accepted=True)
        try:
            connection.settimeout(_HELLO_LIMIT_S)
            connection.sendall(json.dumps({"nonce": nonce}).encode() + b"\n")
            hello = peer.receive(_HELLO_LIMIT_S)
        except (OSError, TimedOut):
            hello = None
        if hello is not None:
            return peer, hello
        peer.close()
    return None


if __name__ == "__main__":
    # A killed mpirun does not end the agent, and a host that cannot be reached never answers.
    die_with_parent(os.getppid())
    sys.exit(main(sys.argv[1:]))
