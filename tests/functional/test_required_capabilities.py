"""`PACELINE_TEST_REQUIRE` turns skips that hide a fault into failures."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.capabilities import REQUIRE, WHY_NOT, detected
from tests.support.commands import run_command

pytestmark = pytest.mark.functional

ROOT = Path(__file__).resolve().parents[2]
A_LAB_TEST = "tests/cluster/lab/test_lab.py::test_lab_that_is_left_stays_until_it_is_closed"
A_SLURM_TEST = "tests/cluster/slurm/test_slurm.py::test_cancelled_job_leaves_nothing"  # in a lab
# The product refuses to make a lab inside of a lab: stands for a fault in its check.
NO_LAB = {"PACELINE_LAB": "pretended"}


def run_pytest(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", REQUIRE))}
    command = [sys.executable, "-m", "pytest", "-c", ROOT / "python" / "pyproject.toml"]
    command += ["--rootdir", ROOT, "-p", "no:cacheprovider", "-q", *words]
    return run_command(command, 120, env={**kept, **variables}, cwd=ROOT)


def test_missing_capabilities_skip_tests_with_the_reason() -> None:
    """Also one that is required, if the test lacks another one, too."""
    ended = run_pytest(A_LAB_TEST, A_SLURM_TEST, **NO_LAB, **{REQUIRE: "slurm"})
    assert ended.returncode == 0, ended.stdout
    assert "2 skipped" in ended.stdout
    assert "lab: this is a host of lab pretended" in ended.stdout


def test_skip_of_a_required_test_is_a_failure() -> None:
    ended = run_pytest(A_LAB_TEST, **NO_LAB, **{REQUIRE: "lab"})
    assert ended.returncode == 1, ended.stdout
    assert f"{REQUIRE} requires lab, but the test was skipped" in ended.stdout


@pytest.mark.needs("lab")
def test_auto_requires_what_this_machine_has_whatever_the_product_says() -> None:
    assert "lab" in detected(), "the product can make a lab, so the tests must detect it"
    ended = run_pytest(A_LAB_TEST, **NO_LAB, **{REQUIRE: "auto"})
    assert ended.returncode == 1, ended.stdout
    assert f"{REQUIRE} requires lab, but the test was skipped" in ended.stdout


def test_unknown_capability_is_an_error() -> None:
    ended = run_pytest(A_LAB_TEST, **NO_LAB, **{REQUIRE: "grafana"})
    assert ended.returncode != 0
    expected = f"expected auto or names of {', '.join(WHY_NOT)}, got grafana"
    assert expected in ended.stdout + ended.stderr


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.needs(name)) for name in ("prometheus", "slurm")]
)
def test_capability_is_detected_where_tests_use_it(name: str) -> None:
    assert name in detected()
