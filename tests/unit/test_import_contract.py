"""The import contract of pyproject.toml: it holds, and it notices what it is there to forbid."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PYTHON_DIR = Path(__file__).resolve().parents[2] / "python"
LINT_IMPORTS = Path(sys.executable).parent / "lint-imports"
LIMIT_S = 120.0


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    package = tmp_path / "paceline"
    shutil.copytree(
        PYTHON_DIR / "src" / "paceline", package, ignore=shutil.ignore_patterns("__pycache__")
    )
    return package


def lint(package: Path) -> tuple[int, str]:
    done = subprocess.run(
        [LINT_IMPORTS, "--config", PYTHON_DIR / "pyproject.toml", "--no-cache"],
        cwd=package.parent,
        env={**os.environ, "PYTHONPATH": str(package.parent), "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_package_as_it_is_keeps_every_contract(copy: Path) -> None:
    code, output = lint(copy)
    assert code == 0, output
    assert " 0 broken" in output


@pytest.mark.parametrize(
    ("module", "statement", "contract"),
    [
        ("spec/new.py", "import paceline.plan", "imports go one way"),
        ("job/new.py", "import paceline.launchers", "imports go one way"),
        ("training/new.py", "import paceline.telemetry", "imports go one way"),
        ("brand_new.py", "", "imports go one way"),
        ("training/new.py", "def f():\n    import pyspark.sql", "pyspark stays"),
        ("launchers/new.py", "from mpi4py import MPI", "mpi4py stays"),
        ("analysis/new.py", "import psutil", "psutil stays"),
        ("telemetry/new.py", "import prometheus_client.core", "prometheus_client stays"),
        ("report/new.py", "import plotly.graph_objects", "plotly stays"),
        ("runner.py", "import paceline.tune", "imports go one way"),
    ],
)
def test_forbidden_import_or_unplaced_module_breaks_its_contract(
    copy: Path, module: str, statement: str, contract: str
) -> None:
    (copy / module).write_text(f"{statement}\n", encoding="utf-8")
    code, output = lint(copy)
    broken = [line for line in output.splitlines() if line.endswith("BROKEN")]
    assert code == 1, output
    assert any(line.startswith(contract) for line in broken), output
