"""Messages between barrier tasks and mpirun's agent: lines of JSON over TCP.

A peer must first send the token of the stage, which Spark sends with the tasks. The module needs
only the standard library, so that the agent starts quickly.
"""

from __future__ import annotations

import json
import secrets
import socket
import time
from typing import Any

from paceline.errors import EnvironmentLacks, TimedOut

Message = dict[str, Any]
# A program that connects and sends nothing delays the next peer by at most this time.
_HELLO_LIMIT_S = 2.0
# A daemon's command line is 1 to 2 kB, the end of its output at most 4 kB.
_LONGEST_LINE_BYTES = 1 << 20
_RETRY_S = 0.1


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
