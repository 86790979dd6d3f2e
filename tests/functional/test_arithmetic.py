"""Keys that change how a training computes, and `sharded`, with two ranks under each launcher."""

from __future__ import annotations

import dataclasses
import json

import pytest
from tests.functional.cli_runs import NO_SIDECAR, cli_in, small, trial

pytestmark = [pytest.mark.functional, pytest.mark.timeout(700)]

COMPILED = {"compile": True, "accumulation_steps": 2, "float32_matmul_precision": "medium"}
SHARDED = {"local_strategy": "sharded", "precision": "fp16"}
ACCUMULATED = {"precision": "fp16", "accumulation_steps": 2}
# All launchers start the same code, so each has a part of the keys: starts take longer than steps.
TRIALS = (
    ("local", "shared", ACCUMULATED), ("torchrun", "gloo", SHARDED), ("mpi", "mpi", SHARDED),
    ("mpi", "mpi", COMPILED), ("spark", "gloo", COMPILED),
)  # fmt: skip
STEPS = 4
LIMIT_S = 650


@pytest.fixture(scope="module")
def compared(tmp_path_factory, cache, tiny_dataset):
    """Return the rows of one run of all launchers, without the baseline.

    tiny_dataset: the data set of the run, made before it.
    """
    folder = tmp_path_factory.mktemp("arithmetic")
    trials = [trial(launcher, transport, **keys) for launcher, transport, keys in TRIALS]
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


def test_every_key_and_strategy_is_equivalent(compared):
    equivalent = {row["configuration"]: row["equivalent"] for row in compared}
    assert equivalent == dict.fromkeys(equivalent, True)
    assert len(equivalent) == len(TRIALS)


def test_the_keys_change_how_the_ranks_compute(compared):
    for row in compared:
        name, difference = row["configuration"], row["max_abs_weight_diff"]
        # half precision differs more than another order of sums
        if row["precision"] == "fp16":
            assert name.endswith((".sharded.n1r2t1.fp16", ".fp16.accumulate2"))
            assert difference > 1e-6
        else:
            assert name.endswith(".accumulate2.compiled.matmul-medium")
            assert difference < 1e-6
