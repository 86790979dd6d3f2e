"""Back end `paceline` for any torch program: import this, then `init_process_group("paceline")`.

Ranks of one host exchange tensors of the CPU through shared memory, and hosts by Gloo. Works where
Gloo does: under torchrun, mpirun, srun and Spark. docs/reference/back-ends.md describes it.
"""

from __future__ import annotations

from paceline.collectives.shared_group import BACKEND

__all__ = ["BACKEND"]
