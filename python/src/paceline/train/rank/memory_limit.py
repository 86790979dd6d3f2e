"""Limit the memory of a rank, so that it fails instead of the machine."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from paceline.base.errors import EnvironmentLacks, PacelineError
from paceline.base.host.memory import limited_private_memory

_MIB = 2**20
# Texts of the errors of torch, oneDNN and the C++ library.
_ALLOCATION_FAILED = ("allocate memory", "bad_alloc", "out of memory", "could not create a memory")


@contextmanager
def limited_memory(mebibytes: int | None, rank: int) -> Iterator[None]:
    """Let larger allocations of private memory fail meanwhile.

    None: no limit. Raises EnvironmentLacks where an allocation fails for that reason.
    """
    if mebibytes is None:
        yield
        return
    try:
        with limited_private_memory(mebibytes * _MIB):
            yield
    except PacelineError:
        raise
    except Exception as error:
        if not _is_of_memory(error):
            raise
        traceback.print_exc()  # into the log of the rank
        raise EnvironmentLacks(
            f"rank {rank}: expected to need at most {mebibytes} MiB of private memory ([limits] "
            "rank_memory_mib), but needs more; use a smaller batch, or activation_checkpointing = "
            "true"
        ) from error


def _is_of_memory(error: Exception) -> bool:
    text = str(error)
    return isinstance(error, MemoryError) or any(part in text for part in _ALLOCATION_FAILED)
