"""`python -m paceline.launchers.spark.mpi.agent HOST COMMAND…`: mpirun calls it in place of ssh.

It passes the start of PRRTE's daemon to the barrier task that leads HOST, and lives as long as the
daemon, but no longer than mpirun. Its exit status is the daemon's.

Tasks and agents exchange lines of JSON over TCP. A peer must first send the token of the stage,
which Spark sends with the tasks. The module needs little besides the standard library, so that it
starts quickly.
"""

from __future__ import annotations

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
from typing import Any

from paceline.errors import EnvironmentLacks, PacelineError, TimedOut, UsageError
from paceline.host.processes import die_with_parent

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
    """The start of PRRTE's daemon on another host, as mpirun asks for it."""

    program: str
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
                program=program,
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
            end = receive(leader, settings["limit_s"])
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


def send(peer: socket.socket, message: Message) -> None:
    peer.sendall(json.dumps(message).encode() + b"\n")


def receive(peer: socket.socket, limit_s: float) -> Message | None:
    """Return the next message; None if the peer has closed or sent something else.

    Raises TimedOut after `limit_s`.
    """
    peer.settimeout(max(limit_s, 0.001))
    # Unbuffered: bytes after the line stay in the socket for the next call.
    try:
        with peer.makefile("rb", buffering=0) as lines:
            line = lines.readline(_LONGEST_LINE_BYTES)
    except TimeoutError as error:
        raise TimedOut(f"no answer within {limit_s:g} s") from error
    except OSError:
        return None
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):  # also nested too deeply
        return None
    return message if isinstance(message, dict) else None


def has_ended(peer: socket.socket, limit_s: float) -> bool:
    """Wait for a peer that sends nothing more to close; False if it has not within `limit_s`."""
    peer.settimeout(max(limit_s, 0.001))
    try:
        while peer.recv(1024):
            pass
    except TimeoutError:
        return False
    except OSError:
        return True
    return True


def connect(address: tuple[str, int], token: str, hello: Message, limit_s: float) -> socket.socket:
    """Connect and send `hello` with the token.

    Raises EnvironmentLacks if nobody answers within `limit_s`.
    """
    deadline = time.monotonic() + limit_s
    while True:
        left_s = max(deadline - time.monotonic(), 0.001)
        try:
            peer = socket.create_connection(address, timeout=left_s)
        except OSError as error:
            if time.monotonic() + _RETRY_S < deadline:
                time.sleep(_RETRY_S)
                continue
            raise EnvironmentLacks(
                f"{address[0]}:{address[1]}: expected a barrier task of this job to answer "
                f"({error}); the hosts must reach one another over the interface of [network] "
                "interface, on any port"
            ) from error
        send(peer, {**hello, "token": token})
        return peer


def accept(
    listener: socket.socket, token: str, limit_s: float
) -> tuple[socket.socket, Message] | None:
    """Return the next peer that knows the token, with its hello; None after `limit_s`."""
    deadline = time.monotonic() + limit_s
    while (left_s := deadline - time.monotonic()) > 0:
        listener.settimeout(left_s)
        try:
            peer, _ = listener.accept()
        except TimeoutError:
            return None
        try:
            hello = receive(peer, min(_HELLO_LIMIT_S, left_s))
        except TimedOut:
            hello = None
        # compare_digest refuses text that is not ASCII.
        if hello is not None and secrets.compare_digest(ascii(hello.get("token")), ascii(token)):
            return peer, hello
        peer.close()
    return None


if __name__ == "__main__":
    # A killed mpirun does not end the agent, and a host that cannot be reached never answers.
    die_with_parent(os.getppid())
    sys.exit(main(sys.argv[1:]))
