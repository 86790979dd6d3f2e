"""`torchrun`: the reference that users know, restricted to this node."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from paceline.host.tools import find_torchrun
from paceline.job.checks import check_cores, check_dataset
from paceline.job.environment import rank_environment
from paceline.launchers.base import OWN_FAILURE, Command

if TYPE_CHECKING:
    from paceline.plan.trial import Trial
    from paceline.records.layout import TrialFiles

_ROOT_CAUSE = re.compile(r"Root Cause.*?rank\s*:\s*(\d+)", re.DOTALL)
_LOCAL_FAILURE = re.compile(r"failed \(exitcode: [^)]*\) local_rank: (\d+)")


class TorchrunLauncher:
    """`python -m torch.distributed.run`, meeting over a file instead of a port.

    With a port, the agent's TCPStore would listen on every interface (pytorch/pytorch#173909).
    """

    name = "torchrun"

    def preflight(self, trial: Trial) -> None:
        find_torchrun()
        check_dataset(trial.training.dataset)
        check_cores(trial)

    def command(self, trial: Trial, files: TrialFiles) -> Command:
        meeting = files.root.resolve() / "torchrun.rendezvous"
        argv = (
            str(find_torchrun().path),
            "-m",
            "torch.distributed.run",
            "--nnodes=1",
            f"--nproc-per-node={trial.placement.ranks}",
            "--max-restarts=0",
            f"--rdzv-id={trial.id}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={meeting}",
            "--rdzv-conf=store_type=file",
            "--local-addr=127.0.0.1",
            "-m",
            "paceline.launchers.local",
            "--trial",
            str(files.trial),
        )
        environment = {
            **rank_environment(trial),
            # Else the agent opens a store for the workers to share, on every interface.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        return Command(argv=argv, environment=environment)

    def failed_rank(self, log_text: str) -> int | None:
        for pattern in (OWN_FAILURE, _ROOT_CAUSE, _LOCAL_FAILURE):
            found = pattern.search(log_text)
            if found:
                return int(found.group(1))
        return None
