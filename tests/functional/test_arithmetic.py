"""Keys that change how a training computes, and `sharded`, with two ranks under every launcher."""

from __future__ import annotations

import dataclasses
import json

import pytest
from tests.functional.cli_runs import NO_SIDECAR, cli_in, small, trial

pytestmark = [pytest.mark.functional, pytest.mark.timeout(700)]

# All keys in one trial: to start ranks takes longer than their steps. Not "medium": a processor
# with AMX computes its products in bfloat16, and differs by more than roundings of fp32.
COMPILED = {"compile": True, "accumulation_steps": 2, "float32_matmul_precision": "high"}
SHARDED = {"local_strategy": "sharded", "precision": "fp16"}
ACCUMULATED = {"precision": "fp16", "accumulation_steps": 2}
MPI, SPARK = ("mpi", "mpi"), ("spark", "gloo")
# Ranks of `local` and `torchrun` run the same code over the same transport, so each has a half.
TRIALS = [
    *(trial(*each, **COMPILED) for each in [("local", "gloo"), MPI, SPARK]),
    *(trial(*each, **SHARDED) for each in [("torchrun", "gloo"), MPI, SPARK]),
    trial("local", "shared", **ACCUMULATED),
]
STEPS = 4


@pytest.fixture(scope="module")
def compared(tmp_path_factory, cache, forks, tiny_dataset):
    """Return the rows of one run of all trials, without the baseline.

    tiny_dataset: the data set of the run, made before it.
    """
    folder = tmp_path_factory.mktemp("arithmetic")
    # A processor without instructions for fp16 takes a second for a step with larger images.
    text = small(max_steps=STEPS, image_size=32).replace(*NO_SIDECAR)
    (folder / "keys.toml").write_text(text + "".join(TRIALS), "utf-8")
    paceline = cli_in(cache, folder, forks)
    # all trials compile the same model
    compiled = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled")}
    paceline = dataclasses.replace(paceline, environment={**paceline.environment, **compiled})
    finished = paceline.main("run", "keys.toml", "--out", "run")
    assert finished.returncode == 0, finished.stderr
    rows = json.loads(paceline.main("compare", "run", "--json").stdout)["rows"]
    return [row for row in rows if not row["is_baseline"]]


def test_every_key_and_strategy_is_equivalent(compared):
    equivalent = {row["configuration"]: row["equivalent"] for row in compared}
    assert equivalent == dict.fromkeys(equivalent, True)
    assert len(equivalent) == len(TRIALS)


def test_compiled_models_differ_by_roundings_of_fp32(compared):
    rows = [row for row in compared if "compiled" in row["configuration"]]
    assert {row["launcher"] for row in rows} == {"local", "mpi", "spark"}
    for row in rows:
        assert row["configuration"].endswith(".accumulate2.compiled.matmul-high")
        assert row["max_abs_weight_diff"] < 1e-6


def test_fp16_differs_more_than_another_order_of_sums(compared):
    rows = {row["launcher"]: row for row in compared if "fp16" in row["configuration"]}
    assert min(row["max_abs_weight_diff"] for row in rows.values()) > 1e-6
    assert rows.pop("local")["configuration"].endswith(".processes.n1r2t1.fp16.accumulate2")
    assert rows.keys() == {"torchrun", "mpi", "spark"}
    assert all(row["configuration"].endswith(".sharded.n1r2t1.fp16") for row in rows.values())
