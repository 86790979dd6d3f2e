"""The socket of the rendezvous: rank 0 binds it to one address and then publishes the address."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from paceline.base.errors import DataError, EnvironmentLacks, TimedOut
from paceline.collectives.host import LOOPBACK, listening_socket
from paceline.collectives.signatures import new_secret
from paceline.measure.records.files import read_json, write_json
from paceline.measure.records.layout import TrialFiles
from paceline.plan.trials.trial import StoreAddress
from paceline.runner.job.job import Job

_POLL_S = 0.02


def listen_on(interface: str) -> StoreAddress:
    """Listen on a free port of the interface's address only.

    The caller owns `listen_fd`. Raises EnvironmentLacks if the interface has no address.
    """
    with listening_socket(interface) as listener:
        host, port = listener.getsockname()
        descriptor = listener.detach()
        return StoreAddress(host=host, port=port, secret=new_secret(), listen_fd=descriptor)


def close_listener(address: StoreAddress) -> None:
    """Close a socket that is not needed after all."""
    if address.listen_fd is not None:
        with suppress(OSError):
            socket.socket(fileno=address.listen_fd).close()


def exchange_address(job: Job, rank: int, own: StoreAddress | None, start: str) -> StoreAddress:
    """Return rank 0's address. Rank 0 writes it to a file for the other ranks on its host, which
    `forget_address` removes.

    own: the socket of rank 0. start: distinguishes this start of the ranks from earlier ones.
    Raises TimedOut after `limits.rendezvous_s`.
    """
    path = _address_file(job.files)
    if rank == 0:
        assert own is not None
        content = {"start": start, "host": own.host, "port": own.port, "secret": own.secret}
        write_json(path, content, mode=0o600)
        return own
    limit_s = job.trial.limits.rendezvous_s
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        try:
            document = read_json(path)
        except DataError:
            document = {}  # rank 0 has not written it yet
        if document.get("start") == start:
            host, port, secret = (document[name] for name in ("host", "port", "secret"))
            return StoreAddress(host=host, port=port, secret=secret)
        time.sleep(_POLL_S)
    raise TimedOut(
        f"rank {rank} waited {limit_s:g} s for rank 0 to write its address to {path}; look at "
        "rank 0's log, or raise limits.rendezvous_s"
    )


def forget_address(files: TrialFiles) -> None:
    """Remove the file of `exchange_address`, which only this user can read, at the trial's end."""
    _address_file(files).unlink(missing_ok=True)


def _address_file(files: TrialFiles) -> Path:
    return files.root / "rendezvous.json"


def check_reachable(interface: str, hosts: Iterable[str]) -> None:
    """Raise EnvironmentLacks if ranks on several hosts would communicate over loopback."""
    names = sorted(set(hosts))
    if len(names) > 1 and interface == LOOPBACK:
        raise EnvironmentLacks(
            f"ranks are on {len(names)} hosts ({', '.join(names)}), which {interface!r} does not "
            "connect; name the interface between them with [network] interface"
        )
