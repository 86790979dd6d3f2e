"""Program that sends the records of a node to the run's remote place when its ranks have ended.

Its argument is the file of an Order. It outlives the ranks, because a killed one can send nothing.
"""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

from paceline.collectives.host import wait_until
from paceline.measure.records.documents import read_statuses
from paceline.measure.records.files import document
from paceline.measure.records.layout import TrialFiles
from paceline.measure.telemetry import sidecar_is_alive
from paceline.runner.job.context import Order
from paceline.runner.job.rank_status import run_guarded
from paceline.train.data.remote_folder import remote_folder

_POLL_S = 0.5


def deliver(order: Order) -> None:
    """Wait for the end of the node's ranks, and send their records. Raises EnvironmentLacks."""
    files = TrialFiles(Path(order.trial_root))
    wait_until(lambda: _have_ended(files, order), order.limit_s, _POLL_S)
    time.sleep(_POLL_S)  # a rank writes the last line of its log after its status
    folder = remote_folder(order.place.host(order.host, "files"))
    folder.make()
    folder.add(files.root)
    remote_folder(order.place.host(order.host, "done")).make()
    shutil.rmtree(order.folder, ignore_errors=True)


def _have_ended(files: TrialFiles, order: Order) -> bool:
    """Return whether nothing writes any more: no rank of this node, and not its sidecar."""
    statuses = read_statuses(files)
    if len(statuses) < order.ranks and order.first_rank.is_alive():
        return False  # a rank is still starting
    writes = any(s.state == "running" and s.is_alive() for s in statuses)
    return not writes and not sidecar_is_alive(files.host(order.host).sidecar)


def main() -> int:
    order = document(Path(sys.argv[1]), Order)
    assert order is not None, "the first rank has written it"
    deliver(order)
    return 0


if __name__ == "__main__":
    sys.exit(run_guarded(main))
