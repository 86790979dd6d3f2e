"""A GPU that is none: a device of torch in the memory of the host, on which strategies train.

mock_gpu.cpp says how it computes. It refuses an operation with tensors of different devices, as
CUDA does. Each of its calls has ended when it returns, so it shows no missing synchronisation, and
says nothing about speed. It is loaded only into processes of its own: torch must know it before the
first backward pass, and then prefers it to others.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import hashlib
import multiprocessing
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.connection import wait
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

NAME = "mockgpu"
_DEVICES = 4  # as in mock_gpu.cpp; ranks that are threads of a process need one each
_SOURCE = Path(__file__).with_name("mock_gpu.cpp")
_CALL_LIMIT_S = 120.0
COMPILE_LIMIT_S = 500.0  # 40 s of CPU time


def compiled(folder: Path) -> Path:
    """Return the library, compiled into `folder` for this torch unless it is there already."""
    key = hashlib.sha256(_SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    library = folder / f"mock_gpu-{key}.so"
    with (folder / "mock_gpu.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # other workers of pytest need it, too
        if not library.exists():
            _compile(library)
    return library


def _compile(library: Path) -> None:
    torch_folder = Path(torch.__file__).parent
    include = torch_folder / "include"
    unfinished = library.with_suffix(".unfinished")
    subprocess.run(
        [
            "g++", "-std=c++20", "-O0", "-fPIC", "-shared", "-w", str(_SOURCE), "-o", unfinished,
            f"-I{include}", f"-I{include / 'torch/csrc/api/include'}",
            f"-L{torch_folder / 'lib'}", "-ltorch_cpu", "-lc10",
        ],
        check=True,
        timeout=COMPILE_LIMIT_S,
    )  # fmt: skip
    unfinished.replace(library)


def load(library: Path) -> None:
    """Add the device to this process, before its first backward pass, and let trials with
    `device = "cuda"` use it."""
    torch.utils.rename_privateuse1_backend(NAME)
    torch.ops.load_library(str(library))
    torch._register_device_module(NAME, _Module(f"torch.{NAME}"))
    torch.library.impl("aten::batch_norm_backward_reduce", "PrivateUse1")(_backward_reduce)
    torch.Tensor.data = property(_OF_BASE.__get__, _set_data)  # type: ignore[assignment]
    torch._has_compatible_shallow_copy_type = _is_compatible
    from paceline.train.training import devices

    devices._gpus = lambda _context: (NAME, _DEVICES)


class _Module(ModuleType):
    """The module of the device for streams, events and settings, in the place of torch.cuda."""

    _initialized = False  # torch.utils.checkpoint saves no random states of it
    Stream, Event = torch.Stream, torch.Event
    current_device = staticmethod(torch.accelerator.current_device_index)
    current_stream = staticmethod(torch.accelerator.current_stream)
    set_device = staticmethod(torch.accelerator.set_device_index)
    synchronize = staticmethod(torch.accelerator.synchronize)
    stream = staticmethod(contextlib.nullcontext)

    def device_count(self) -> int:
        return _DEVICES

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def get_device_name(self, _device: torch.device) -> str:
        return "memory of the host"

    def is_available(self) -> bool:
        return True

    def _lazy_init(self) -> None: ...

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, _seed: int) -> None: ...


def _backward_reduce(
    gradient: Tensor,
    inputs: Tensor,
    mean: Tensor,
    _deviation: Tensor,
    _weight: Tensor | None,
    input_g: bool,
    weight_g: bool,
    bias_g: bool,
) -> tuple[Tensor | None, ...]:
    """Compute what CUDA's kernel does for SyncBatchNorm; the CPU has no such kernel."""
    assert (input_g, weight_g, bias_g) == (True, False, False)
    dims = [dim for dim in range(inputs.dim()) if dim != 1]
    shape = [1, -1, *[1] * (inputs.dim() - 2)]
    gradient, centred = gradient.float(), inputs.float() - mean.view(shape)
    return gradient.sum(dims), (gradient * centred).sum(dims), None, None


_OF_BASE: Any = torch._C.TensorBase.data


def _set_data(self: Tensor, data: Tensor) -> None:
    if self.device.type != data.device.type:
        torch.ops.mock_gpu.set_data(self, data)
    else:
        _OF_BASE.__set__(self, data)


def _is_compatible(input: Tensor, from_: Tensor) -> bool:  # noqa: A002  (names of torch)
    """Return whether nn.Module.to keeps a parameter and changes its data, as for CUDA."""
    return True


def _begin(library: Path) -> None:
    """Prepare a process of MockGpus; it ends with the process of the tests, even if that is
    killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    load(library)


class MockGpus:
    """Processes that have the device."""

    def __init__(self, library: Path, processes: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._processes = [
            ProcessPoolExecutor(1, mp_context=context, initializer=_begin, initargs=(library,))
            for _ in range(processes)
        ]

    def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """Return what a function of a module returns, called in one of the processes."""
        return self._processes[0].submit(_limited, function, *arguments).result()

    def run_ranks(self, function: Callable[..., T], *arguments: Any, ranks: int = 2) -> list[T]:
        """Call a function in several processes at once, with the rank as its first argument."""
        calls = [
            process.submit(_limited, function, rank, *arguments)
            for rank, process in enumerate(self._processes[:ranks])
        ]
        return [call.result() for call in calls]

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.shutdown()


def _limited(function: Callable[..., T], *arguments: Any) -> T:
    """Call the function; end this process if it takes too long."""
    faulthandler.dump_traceback_later(_CALL_LIMIT_S, exit=True)
    try:
        return function(*arguments)
    finally:
        faulthandler.cancel_dump_traceback_later()


@contextlib.contextmanager
def mock_gpus(folder: Path, processes: int = 2) -> Iterator[MockGpus]:
    """Give processes with the device, whose library is compiled into `folder`."""
    gpus = MockGpus(compiled(folder), processes)
    try:
        yield gpus
    finally:
        gpus.close()
