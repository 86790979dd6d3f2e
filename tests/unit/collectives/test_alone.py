"""Tensors are exchanged without any other part of Paceline, and without what other parts need."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

from paceline import collectives

PROGRAM = Path(__file__).parent / "alone_program.py"
PACKAGE = Path(collectives.__file__).parent
LIMIT_S = 120.0


def imported(source: str) -> set[str]:
    """Return the packages that a module imports; of Paceline, also the package within it."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0
            found.add(str(node.module))
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    return {".".join(name.split(".")[: 2 if name.startswith("paceline") else 1]) for name in found}


def test_only_torch_and_numpy_are_needed_and_mpi4py_for_mpi() -> None:
    for file in PACKAGE.rglob("*.py"):
        allowed = {"paceline.collectives", "torch", "numpy", *sys.stdlib_module_names}
        if file.parent.name == "mpi":
            allowed.add("mpi4py")
        assert imported(file.read_text()) <= allowed, file


def test_two_ranks_sum_while_nothing_else_of_paceline_can_be_imported(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(PACKAGE.parent), str(tmp_path / "store"), str(rank)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        ended = [rank.communicate(timeout=LIMIT_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, (out, errors) in zip(ranks, ended, strict=True):
        assert rank.returncode == 0, errors
        assert json.loads(out) == {
            "summed": [3.0] * 5,
            "operations": [["allreduce", "shared", 20, 0]],
            "refused": "paceline.base",
        }


FOUND = """
import json, sys
import torch
loaded = sum(name.partition(".")[0] == "paceline" for name in sys.modules)
store = torch.distributed.HashStore()
torch.distributed.init_process_group("paceline", store=store, rank=0, world_size=1)
torch.distributed.destroy_process_group()
import paceline.distributed  # a script that was written before may still import it
print(json.dumps([loaded, "pydantic" in sys.modules]))
"""


def test_torch_finds_the_back_end_of_the_installed_package_and_loads_little(tmp_path: Path) -> None:
    project = tomllib.loads((PACKAGE.parents[2] / "pyproject.toml").read_text())["project"]
    points = project["entry-points"]["torch.backends"]
    installed = tmp_path / "paceline_installed-1.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: paceline-installed\nVersion: 1"
    )
    lines = ["[torch.backends]", *(f"{name} = {place}" for name, place in points.items())]
    (installed / "entry_points.txt").write_text("\n".join(lines))
    path = os.pathsep.join([str(tmp_path), str(PACKAGE.parents[1])])
    ended = subprocess.run(
        [sys.executable, "-c", FOUND], env={**os.environ, "PYTHONPATH": path}, check=False,
        capture_output=True, text=True, timeout=LIMIT_S,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    loaded, heavy = json.loads(ended.stdout)
    assert loaded <= 9
    assert not heavy
