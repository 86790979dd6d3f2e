"""Rank of a group of two: PACKAGE STORE RANK. Prints what it summed, and the operations."""

from __future__ import annotations

import json
import pkgutil
import sys
from collections.abc import Sequence
from datetime import timedelta
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

ALLOWED = "paceline.collectives"


class Refusing(MetaPathFinder):
    """Refuses to import other parts of Paceline."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.startswith("paceline.") and not name.startswith(ALLOWED):
            raise ImportError(f"{name} is refused", name=name)
        return None


def main() -> None:
    package, file, rank = sys.argv[1:]
    sys.meta_path.insert(0, Refusing())
    root = ModuleType("paceline")  # the package's own __init__ is one of the others
    root.__path__ = [package]
    sys.modules["paceline"] = root
    collectives = import_module(ALLOWED)
    for module in pkgutil.walk_packages(collectives.__path__, f"{ALLOWED}."):
        if not module.name.startswith(f"{ALLOWED}.mpi."):  # only for ranks of an MPI job
            import_module(module.name)
    collectives.register()

    import torch
    import torch.distributed as dist

    store = dist.FileStore(file, 2)
    limit = timedelta(seconds=60)
    dist.init_process_group("paceline", store=store, rank=int(rank), world_size=2, timeout=limit)
    tensor = torch.full((5,), 1.0 + int(rank))
    operations: list[list[object]] = []
    recorder = import_module(f"{ALLOWED}.recorder")

    def report(ended: Sequence[object]) -> None:
        fields = ("operation", "algorithm", "payload_bytes", "sequence")
        operations.extend([getattr(each, name) for name in fields] for each in ended)

    with recorder.reporting(report):
        dist.all_reduce(tensor)
        assert operations == []  # nothing is reported during a step
    dist.destroy_process_group()
    try:
        import_module("paceline.base.errors")
    except ImportError as refused:
        print(json.dumps({
            "summed": tensor.tolist(), "operations": operations, "refused": refused.name,
        }))  # fmt: skip


if __name__ == "__main__":
    main()
