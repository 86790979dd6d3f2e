"""What barrier tasks and mpirun's remote-start agent say to one another: lines of JSON over TCP.

Nothing is believed that does not begin with the job's token, which Spark's allGather has spread.
Needs the standard library alone, so that the agent starts quickly.
"""

from __future__ import annotations

import json
import secrets
import socket
import time
from typing import Any

from paceline.errors import EnvironmentLacks, TimedOut

Message = dict[str, Any]
# Strangers that connect and say nothing may hold the next one up for so long.
_HELLO_LIMIT_S = 2.0
# A daemon's command line is 1 to 2 kB, the end of its output at most 4 kB.
_LONGEST_LINE_BYTES = 1 << 20
_RETRY_S = 0.1


def new_token() -> str:
    """What the tasks of one job know one another by."""
    return secrets.token_hex(16)


def send(peer: socket.socket, message: Message) -> None:
    peer.sendall(json.dumps(message).encode() + b"\n")


def receive(peer: socket.socket, limit_s: float) -> Message | None:
    """The next message; None if the peer has gone, or says what is no message.

    Raises TimedOut after `limit_s`.
    """
    peer.settimeout(max(limit_s, 0.001))
    # Unbuffered: what comes after the line stays in the socket, for whoever asks next.
    try:
        with peer.makefile("rb", buffering=0) as lines:
            line = lines.readline(_LONGEST_LINE_BYTES)
    except TimeoutError as error:
        raise TimedOut(f"no answer within {limit_s:g} s") from error
    except OSError:
        return None
    try:
        message = json.loads(line)
    except ValueError:
        return None
    return message if isinstance(message, dict) else None


def has_ended(peer: socket.socket, limit_s: float) -> bool:
    """Wait for a peer, which says no more, to go away; False if it is still there after
    `limit_s`."""
    peer.settimeout(max(limit_s, 0.001))
    try:
        while peer.recv(1024):
            pass
    except TimeoutError:
        return False
    except OSError:
        return True
    return True


def greet(address: tuple[str, int], token: str, hello: Message, limit_s: float) -> socket.socket:
    """Connect and say who we are. Raises EnvironmentLacks if nobody answers within `limit_s`."""
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
                "interface or --interface, on any port"
            ) from error
        send(peer, {**hello, "token": token})
        return peer


def accept(
    listener: socket.socket, token: str, limit_s: float
) -> tuple[socket.socket, Message] | None:
    """The next peer that knows the token, and its hello; None if none comes within `limit_s`."""
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
        if hello is not None and secrets.compare_digest(str(hello.get("token")), token):
            return peer, hello
        peer.close()
    return None
