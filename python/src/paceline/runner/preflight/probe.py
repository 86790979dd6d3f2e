"""The probe on one host: `python -m paceline.runner.preflight.probe`.

It reads one request per line from standard input and answers each with one line on standard output,
so the remote shell that started it is the only connection that it needs. It ends with its input.
torch is imported only for the all-reduce.
"""

from __future__ import annotations

import hmac
import json
import os
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.base.errors import EnvironmentLacks, PacelineError
from paceline.base.host.cgroups import read_limits
from paceline.base.host.locks import flock_file
from paceline.base.host.machine import (
    THREAD_VARIABLES,
    best_offset,
    interface_to,
    package_versions,
    usable_cores,
)
from paceline.collectives.host import (
    boot_id,
    host_identity,
    host_name,
    interface_address,
    listening_socket,
    wait_until,
)
from paceline.measure.records.files import jsonable, write_text
from paceline.plan.trials.trial import StoreAddress

# --- the answers of a probe ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """A host as its probe sees it."""

    host: str  # its own name
    identity: str  # equal for two names of one host
    boot_id: str  # equal for parts of one machine
    address: str | None  # of the interface; None if it has none
    address_fault: str | None
    resolved: dict[str, str | None]  # addresses by the names of all hosts; None: unknown
    versions: dict[str, str]
    threads: dict[str, str]  # variables that choose numbers of threads
    cores: int
    cgroup_cores: float | None  # None: no limit
    cgroup_memory_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """An address where a probe listens."""

    host: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbedLink:
    """Short messages from one host to another, and the clock of the other one.

    latency_s: one way. offset_s: to add to the own time to get the other's, correct within
    +-offset_error_s.
    """

    latency_s: float
    offset_s: float
    offset_error_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """A long message from one host to another."""

    bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A shared folder as one host sees it, after every host has used it.

    appended, renamed: hosts whose changes arrived. excluded: the lock of the first host holds here;
    None if the file system has no locks.
    """

    appended: int
    renamed: int
    excluded: bool | None


MARK = "paceline-probe "  # a login shell may print lines of its own
CONNECT_S = 3.0
STREAM_S = 0.4  # of the longer of two transfers
_LIFETIME_S = 600
_PEER_S = 10.0  # limit of each wait for a connected peer
_RESOLVE_S = 5.0
_SEEN_S = 10.0  # a shared file system may show the files of other hosts this late
_ROUNDS = 20  # of short messages
_FIRST_BYTES = 2**16
_MOST_BYTES = 2**28
_CHUNK = bytes(2**18)
_LENGTH = struct.Struct("!q")  # of the bytes that follow; 0 asks for the time
_TIME = struct.Struct("!d")
_NOTHING_SIGNED = ""  # a probe stores nothing but what Gloo does
_REPEATS = 3  # of the all-reduce; the first one opens connections


class Probe:
    """The requests that a probe answers; `opened` closes what a request leaves open."""

    def __init__(self, opened: ExitStack) -> None:
        self._opened = opened
        self._store: StoreAddress | None = None  # of the first host

    def interface_to(self, name: str) -> str:
        """Return the interface by which this host sends to another one."""
        return interface_to(name)

    def facts(self, names: Sequence[str], interface: str) -> Facts:
        """Describe this host. names: of all hosts."""
        address, fault = None, None
        try:
            address = interface_address(interface)
        except EnvironmentLacks as error:
            fault = str(error)
        limits = read_limits()
        return Facts(
            host=host_name(),
            identity=host_identity(),
            boot_id=boot_id(),
            address=address,
            address_fault=fault,
            resolved=_resolved(names),
            versions=package_versions(),
            threads={n: os.environ[n] for n in THREAD_VARIABLES if n in os.environ},
            cores=usable_cores(),
            cgroup_cores=limits.cpus,
            cgroup_memory_bytes=limits.memory_bytes,
        )

    def listen(self, interface: str, token: str) -> Address:
        """Serve messages, streams and the time to the other probes, which know the token."""
        listener = self._opened.enter_context(listening_socket(interface))
        threading.Thread(target=_serve, args=(listener, token.encode()), daemon=True).start()
        host, port = listener.getsockname()
        return Address(host=host, port=port)

    def messages(self, own: str, host: str, port: int, token: str) -> ProbedLink:
        """Measure latency and clock between this host's address `own` and a listening probe."""
        with _connected(own, host, port, token) as peer:
            rounds, trips_s = [], []
            for _ in range(_ROUNDS):
                began_s, asked = time.perf_counter(), time.time()
                peer.sendall(_LENGTH.pack(0))
                [theirs] = _TIME.unpack(_received(peer, _TIME.size))
                rounds.append((asked, theirs, time.time()))
                trips_s.append(time.perf_counter() - began_s)
        offset = best_offset(rounds)
        return ProbedLink(
            latency_s=min(trips_s) / 2, offset_s=offset.offset_s, offset_error_s=offset.error_s
        )

    def stream(self, own: str, host: str, port: int, token: str) -> Stream:
        """Measure the bandwidth to a listening probe; two transfers, the first one short."""
        with _connected(own, host, port, token) as peer:
            first_s = _send_stream(peer, _FIRST_BYTES)
            rate = _FIRST_BYTES / first_s
            length = max(_FIRST_BYTES, min(_MOST_BYTES, int(rate * STREAM_S)))
            return Stream(bytes_per_s=length / _send_stream(peer, length))

    def store(self, interface: str) -> Address:
        """Open the socket of the rendezvous on the first host."""
        with listening_socket(interface) as listener:
            host, port = listener.getsockname()
            self._store = StoreAddress(
                host=host, port=port, secret=_NOTHING_SIGNED, listen_fd=listener.detach()
            )
        return Address(host=host, port=port)

    def all_reduce(
        self,
        rank: int,
        names: Sequence[str],
        host: str,
        port: int,
        interface: str,
        payload_bytes: int,
        limit_s: float,
    ) -> float:
        """Return the seconds of an all-reduce of Gloo over the interface; collective."""
        from paceline.runner.preflight.all_reduce import all_reduce_s  # noqa: PLC0415  (imports torch)

        address = (
            self._store if rank == 0 else StoreAddress(host=host, port=port, secret=_NOTHING_SIGNED)
        )
        assert address is not None, "store"
        place = (rank, len(names))
        return all_reduce_s(place, address, interface, payload_bytes, _REPEATS, limit_s)

    def make_folder(self, folder: str) -> str:
        """Make a folder for the tests of a shared folder; it is removed at the end."""
        temporary = tempfile.TemporaryDirectory(
            prefix=".paceline-doctor-", dir=folder, ignore_cleanup_errors=True
        )
        return self._opened.enter_context(temporary)

    def use_folder(self, made: str, number: int) -> None:
        """Append to a file that all hosts share, and replace a file by a rename."""
        folder = Path(made)
        with (folder / "appended").open("a", encoding="utf-8") as file:
            file.write(f"{number}\n")
        for content in ("first", "second"):
            write_text(folder / f"renamed-{number}", content)

    def lock_folder(self, made: str) -> None:
        """Keep a lock until the end."""
        file = self._opened.enter_context((Path(made) / "lock").open("a", encoding="utf-8"))
        flock_file(file)

    def look_at_folder(self, made: str, hosts: int) -> Seen:
        """Return what this host sees of the appends, renames and the lock of `hosts` hosts."""
        folder = Path(made)

        def appended() -> int:
            return len((folder / "appended").read_text("utf-8").splitlines())

        def renamed() -> int:
            paths = list(folder.glob("renamed-*"))
            return sum(path.read_text("utf-8") == "second" for path in paths)

        wait_until(lambda: appended() == renamed() == hosts, _SEEN_S)
        with (folder / "lock").open("a", encoding="utf-8") as file:
            got_lock = flock_file(file)
        return Seen(
            appended=appended(),
            renamed=renamed(),
            excluded=None if got_lock is None else not got_lock,
        )


def _resolved(names: Sequence[str]) -> dict[str, str | None]:
    """Return the IPv4 address of each name; None for one that is unknown after some seconds."""
    found: dict[str, str | None] = dict.fromkeys(names)

    def resolve(name: str) -> None:
        with suppress(OSError):
            found[name] = socket.gethostbyname(name)

    threads = [threading.Thread(target=resolve, args=(name,), daemon=True) for name in names]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + _RESOLVE_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return dict(found)


def _connected(own: str, host: str, port: int, token: str) -> socket.socket:
    """Connect from one address to another. Raises OSError."""
    peer = socket.create_connection((host, port), CONNECT_S, source_address=(own, 0))
    peer.settimeout(_PEER_S)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.sendall(token.encode())
    return peer


def _send_stream(peer: socket.socket, length: int) -> float:
    """Send so many bytes; return the seconds until the other side has them all."""
    began_s = time.perf_counter()
    peer.sendall(_LENGTH.pack(length))
    left = length
    while left:
        part = _CHUNK[: min(left, len(_CHUNK))]
        peer.sendall(part)
        left -= len(part)
    _received(peer, _TIME.size)
    return time.perf_counter() - began_s


def _received(peer: socket.socket, length: int) -> bytes:
    """Return exactly so many bytes. Raises OSError."""
    found = bytearray()
    while len(found) < length:
        part = peer.recv(length - len(found))
        if not part:
            raise ConnectionError("the other probe closed the connection")
        found += part
    return bytes(found)


def _serve(listener: socket.socket, token: bytes) -> None:
    with suppress(OSError):  # closed at the end
        while True:
            peer, _ = listener.accept()
            threading.Thread(target=_answer, args=(peer, token), daemon=True).start()


def _answer(peer: socket.socket, token: bytes) -> None:
    """Answer one connection: discard what it sends and return the time, until it closes."""
    with peer, suppress(OSError):
        peer.settimeout(_PEER_S)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if not hmac.compare_digest(_received(peer, len(token)), token):
            return
        room = memoryview(bytearray(len(_CHUNK)))
        while True:
            [left] = _LENGTH.unpack(_received(peer, _LENGTH.size))
            while left > 0:
                got = peer.recv_into(room, min(left, len(room)))
                if got == 0:
                    return
                left -= got
            peer.sendall(_TIME.pack(time.time()))


def _requests(probe: Probe) -> Mapping[str, Callable[..., object]]:
    return {
        "interface_to": probe.interface_to,
        "facts": probe.facts,
        "listen": probe.listen,
        "messages": probe.messages,
        "stream": probe.stream,
        "store": probe.store,
        "all_reduce": probe.all_reduce,
        "make_folder": probe.make_folder,
        "use_folder": probe.use_folder,
        "lock_folder": probe.lock_folder,
        "look_at_folder": probe.look_at_folder,
    }


def _result(handler: Callable[..., object], arguments: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return {"value": jsonable(handler(**arguments))}
    except (PacelineError, OSError, RuntimeError) as error:
        return {"error": str(error) or type(error).__name__}


def _end(_number: int, _frame: object) -> None:
    raise SystemExit(1)


def main() -> None:
    signal.signal(signal.SIGALRM, _end)
    signal.signal(signal.SIGTERM, _end)
    signal.alarm(_LIFETIME_S)
    with ExitStack() as opened:
        requests = _requests(Probe(opened))
        for line in sys.stdin:
            request = json.loads(line)
            answer = _result(requests[request["request"]], request["arguments"])
            print(f"{MARK}{json.dumps(answer)}", flush=True)


if __name__ == "__main__":
    main()
