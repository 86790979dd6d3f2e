"""The import contracts of pyproject.toml: the package keeps them, and faults break them."""

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


def copy_of_package(folder: Path) -> Path:
    package = folder / "paceline"
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


# A module that is added, its content, and the line with which its contract reports it.
FAULTS = {
    "plan/spec/new": (
        "import paceline.plan.trials", "paceline.plan.spec.new -> paceline.plan.trials",
    ),
    "runner/job/new": (
        "import paceline.runner.launchers", "paceline.runner.job.new -> paceline.runner.launchers",
    ),
    "train/training/new": (
        "import paceline.runner.job", "paceline.train.training.new -> paceline.runner.job",
    ),
    "measure/telemetry/new": (
        "import paceline.analysis", "paceline.measure.telemetry.new -> paceline.analysis",
    ),
    "collectives/new": (
        "import paceline.base.host", "paceline.collectives.new -> paceline.base.host",
    ),
    "brand_new": ("", "paceline.brand_new"),
    "train/brand_new": ("", "paceline.train.brand_new"),
    "train/training/spark": (
        "def f():\n    import pyspark.sql", "paceline.train.training.spark -> pyspark",
    ),
    "runner/launchers/new": (
        "from mpi4py import MPI", "paceline.runner.launchers.new -> mpi4py",
    ),
    "analysis/statistics/new": ("import psutil", "paceline.analysis.statistics.new -> psutil"),
    "measure/records/new": (
        "import prometheus_client.core", "paceline.measure.records.new -> prometheus_client",
    ),
    "show/report/new": (
        "import plotly.graph_objects", "paceline.show.report.new -> plotly",
    ),
    "runner/trials/new": (
        "import paceline.train.strategies.threads",
        "paceline.runner.trials.new -> paceline.train.strategies.threads",
    ),
    "runner/lab/new": (
        "import paceline.runner.launchers.mpi.rank",
        "paceline.runner.lab.new -> paceline.runner.launchers.mpi.rank",
    ),
    "runner/trials/__init__": (
        "import paceline.runner.tune", "paceline.runner.trials -> paceline.runner.tune",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the lines that report a fault, of one package with all FAULTS."""
    package = copy_of_package(tmp_path_factory.mktemp("faults"))
    for module, (statement, _) in FAULTS.items():
        with (package / f"{module}.py").open("a", encoding="utf-8") as file:
            file.write(f"\n{statement}\n")
    code, output = lint(package)
    assert code == 1, output
    found = [line for line in output.splitlines() if line.startswith("- ")]
    return [line[2:].partition(" (l.")[0] for line in found]


@pytest.mark.parametrize("module", FAULTS)
def test_forbidden_import_or_unplaced_module_is_reported(reported: list[str], module: str) -> None:
    assert FAULTS[module][1] in reported
