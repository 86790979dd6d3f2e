"""Keys that change how a training computes, and `sharded`, with two ranks under every launcher."""

from __future__ import annotations

import dataclasses
import json

import pytest
from tests.functional.cli_runs import NO_SIDECAR, cli_in, small, trial

pytestmark = [pytest.mark.functional, pytest.mark.timeout(700)]

LAUNCHERS = {"local": "gloo", "torchrun": "gloo", "mpi": "mpi", "spark": "gloo"}
# All keys in two trials for each launcher: to start ranks takes longer than their steps.
COMPILED = {"compile": True, "accumulation_steps": 2, "float32_matmul_precision": "medium"}
SHARDED = {"local_strategy": "sharded", "precision": "fp16"}
ACCUMULATED = {"precision": "fp16", "accumulation_steps": 2}
STEPS = 4
LIMIT_S = 650


@pytest.fixture(scope="module")
def compared(tmp_path_factory, cache, tiny_dataset):
    """Return the rows of one run of all launchers, without the baseline.

    tiny_dataset: the data set of the run, made before it.
    """
    folder = tmp_path_factory.mktemp("arithmetic")
    trials = [trial(*each, **keys) for each in LAUNCHERS.items() for keys in (COMPILED, SHARDED)]
    trials.append(trial("local", "shared", **ACCUMULATED))
    text = small(max_steps=STEPS).replace(*NO_SIDECAR)
    (folder / "keys.toml").write_text(text + "".join(trials), "utf-8")
    paceline = cli_in(cache, folder)
    # all trials compile the same model
    compiled = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled")}
    paceline = dataclasses.replace(paceline, environment={**paceline.environment, **compiled})
    finished = paceline("run", "keys.toml", "--out", "run", limit_s=LIMIT_S)
    assert finished.returncode == 0, finished.stderr
    rows = json.loads(paceline.main("compare", "run", "--json").stdout)["rows"]
    return [row for row in rows if not row["is_baseline"]]


@pytest.fixture(params=LAUNCHERS)
def rows(request, compared):
    """Return the rows of one launcher by strategy, with `transport` for those of `compared`."""
    transport = LAUNCHERS[request.param]
    found = [row for row in compared if row["launcher"] == request.param]
    return {row["local_strategy"]: row for row in found if row["transport"] == transport}


def test_every_key_and_strategy_is_equivalent(compared):
    equivalent = {row["configuration"]: row["equivalent"] for row in compared}
    assert equivalent == dict.fromkeys(equivalent, True)
    assert len(equivalent) == 2 * len(LAUNCHERS) + 1


def test_the_keys_change_how_the_ranks_compute(rows):
    compiled, sharded = rows["processes"], rows["sharded"]
    assert compiled["configuration"].endswith(".accumulate2.compiled.matmul-medium")
    assert sharded["configuration"].endswith(".sharded.n1r2t1.fp16")
    # half precision differs more than another order of sums
    assert compiled["max_abs_weight_diff"] < 1e-6 < sharded["max_abs_weight_diff"]


def test_accumulation_under_fp16_differs_by_its_roundings(compared):
    [row] = [row for row in compared if row["transport"] == "shared"]
    assert row["configuration"].endswith(".fp16.accumulate2")
    assert row["max_abs_weight_diff"] > 1e-6
