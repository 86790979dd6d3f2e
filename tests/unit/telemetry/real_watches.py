"""Watches of real processes, and what they leave."""

from __future__ import annotations

import contextlib
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import psutil

from paceline.records.files import read_json, read_jsonl
from paceline.telemetry.sidecar import SidecarHandle, SidecarOptions, start_sidecar

Sleeper = Callable[[], "subprocess.Popen[bytes]"]


@contextlib.contextmanager
def started(options: SidecarOptions) -> Iterator[SidecarHandle]:
    handle = start_sidecar(options)
    assert handle is not None
    try:
        yield handle
    finally:
        handle.stop()


def wait_until(condition: Callable[[], bool], limit_s: float = 20.0) -> None:
    limit = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < limit, "waited in vain"
        time.sleep(0.02)


def trace_of(options: SidecarOptions) -> list[dict[str, Any]]:
    assert options.out is not None
    return list(read_jsonl(options.out)) if options.out.exists() else []


def samples_of(options: SidecarOptions) -> list[dict[str, Any]]:
    return [row for row in trace_of(options) if "unix_s" in row]


def state_of(options: SidecarOptions) -> dict[str, Any]:
    assert options.state is not None
    return read_json(options.state)


def end_reason(options: SidecarOptions) -> str | None:
    reason: str | None = state_of(options)["ended"]
    return reason


def listeners(pid: int) -> list[tuple[str, int]]:
    """Addresses at which the process listens, as the kernel tells."""
    return [
        (connection.laddr.ip, connection.laddr.port)
        for connection in psutil.Process(pid).net_connections("all")
        if connection.status == psutil.CONN_LISTEN
    ]


def answer_of(port: int | None) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as response:
        content: bytes = response.read()
    return content.decode()


def other(options: SidecarOptions, pid: int, **changes: Any) -> SidecarOptions:
    """A second watch, of another process and with another trace."""
    assert options.out is not None
    folder = options.out.parent.parent / "b"
    return replace(
        options,
        **{
            "out": folder / "trace.jsonl",
            "state": folder / "sidecar.json",
            "pids": (pid,),
            **changes,
        },
    )
