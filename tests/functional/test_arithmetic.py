"""Keys that change how a training computes, with two ranks under every launcher."""

from __future__ import annotations

import json

import pytest
from tests.functional.cli_runs import NO_SIDECAR, cli_in, small, trial

pytestmark = [pytest.mark.functional, pytest.mark.timeout(500)]

LAUNCHERS = {"torchrun": "gloo", "mpi": "mpi", "spark": "gloo"}
# All keys in two trials for each launcher: to start ranks takes longer than their steps.
KEYS = (
    {"compile": True, "accumulation_steps": 2, "float32_matmul_precision": "medium"},
    {"precision": "fp16", "accumulation_steps": 2},
)
STEPS = 4
LIMIT_S = 450


@pytest.fixture(scope="module")
def compared(tmp_path_factory, cache, tiny_dataset):
    """Return the rows of one run of all launchers, without the baseline.

    tiny_dataset: the data set of the run, made before it.
    """
    folder = tmp_path_factory.mktemp("arithmetic")
    trials = [trial(*each, **keys) for each in LAUNCHERS.items() for keys in KEYS]
    text = small(max_steps=STEPS).replace(*NO_SIDECAR)
    (folder / "keys.toml").write_text(text + "".join(trials), "utf-8")
    paceline = cli_in(cache, folder)
    finished = paceline("run", "keys.toml", "--out", "run", limit_s=LIMIT_S)
    assert finished.returncode == 0, finished.stderr
    rows = json.loads(paceline.main("compare", "run", "--json").stdout)["rows"]
    return [row for row in rows if not row["is_baseline"]]


@pytest.fixture(params=LAUNCHERS)
def rows(request, compared):
    """Return the rows of one launcher by precision."""
    return {row["precision"]: row for row in compared if row["launcher"] == request.param}


def test_every_key_is_equivalent(rows):
    found = {precision: row["equivalent"] for precision, row in rows.items()}
    assert found == {"fp32": True, "fp16": True}


def test_the_keys_change_how_the_ranks_compute(rows):
    assert rows["fp32"]["configuration"].endswith(".accumulate2.compiled.matmul-medium")
    assert rows["fp16"]["configuration"].endswith(".fp16.accumulate2")
    # half precision differs more than another order of sums
    assert rows["fp32"]["max_abs_weight_diff"] < 1e-6 < rows["fp16"]["max_abs_weight_diff"]
