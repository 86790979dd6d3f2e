"""Back end `paceline` for any torch program: `init_process_group("paceline")`.

Ranks of one host exchange tensors of the CPU through shared memory, and hosts by Gloo. Works where
Gloo does: under torchrun, mpirun, srun and Spark. docs/reference/back-ends.md describes it.

torch finds the back end itself once this package is installed, unless TORCH_DEVICE_BACKEND_AUTOLOAD
is 0 or a source tree is used; then import this before.
"""

from __future__ import annotations

from paceline.collectives import BACKEND, register
from paceline.collectives.in_place import share_buckets

__all__ = ["BACKEND", "share_buckets"]

register()
