"""Sockets: on which processes listen beyond loopback, and free addresses of it."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from pathlib import Path

from paceline.base.host.processes import command_line_of


def open_listeners(pids: Iterable[int]) -> list[tuple[str, str]]:
    """Return program and address of every socket on which `pids` listen beyond loopback."""
    loopback = ("0100007F", "0" * 24 + "01000000", "0000000000000000FFFF00000100007F")
    sockets = {}
    for name in ("tcp", "tcp6"):
        for line in Path("/proc/net", name).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                sockets[f"socket:[{fields[9]}]"] = fields[1].partition(":")[0]
    found = []
    for pid in pids:
        for link in descriptors(pid):
            try:
                address = sockets.get(str(link.readlink()))
            except OSError:
                continue  # closed meanwhile
            if address is not None and address not in loopback:
                program = Path(next(iter(command_line_of(pid)), "ended")).name
                found.append((program, address))
    return found


def descriptors(pid: int) -> list[Path]:
    """Return the links of a process's open files; none if it has ended."""
    try:
        return list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return []


def free_address() -> str:
    """Return a free port of the loopback interface, as HOST:PORT."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{listener.getsockname()[1]}"
