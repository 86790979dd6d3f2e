"""The example task, as its README runs it, and a language model: certified equivalent.

Every local strategy with the example: tests/unit/train/strategies/test_own_task.py.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tests.functional.cli_runs import cli_in
from tests.support.specs import spec_text

pytestmark = [pytest.mark.functional, pytest.mark.timeout(400)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "own-task"
STRATEGIES = {"sequential", "intraop", "threads", "processes", "pipeline", "hybrid"}

GPT = spec_text(
    'launcher = "local"; local_strategy = "pipeline"; stages = 2; oversubscribe = true',
    workload='name = "gpt-small"; '
    "options = { vocabulary = 32, length = 24, width = 32, blocks = 3 }",
    tables="[telemetry]; enabled = false; [training]; max_steps = 60; epochs = 2; "
    "warmup_steps = 1; held_out_samples = 16; evaluate_every_steps = 20; "
    'target = { metric = "loss", at_most = 2.95 }',
    repeats=1,
)

# A bias before a batch normalisation has a gradient of roundings only, of which Adam makes steps.
CNN = """
import torch
from torch import nn
from torch.utils.data import Dataset
import paceline

class Images(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return torch.randn(3, 12, 12, generator=torch.Generator().manual_seed(index)), index % 3

class Cnn(paceline.Task):
    def dataset(self):
        return Images()
    def model(self):
        return nn.Sequential(
            nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(),
            nn.Conv2d(6, 6, 3), nn.BatchNorm2d(6), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3),
        )
    def optimizer(self, parameters):
        return torch.optim.AdamW([each for _, each in parameters], lr=0.01)
"""
CNN_TRIALS = """
launcher = "local"; local_strategy = "intraop"; threads_per_rank = 2; oversubscribe = true
launcher = "local"; local_strategy = "threads"; replicas = 2; oversubscribe = true
launcher = "local"; local_strategy = "processes"; ranks_per_node = 2; oversubscribe = true
"""


def test_language_model_is_split_evaluated_and_equivalent(cache, forks, tmp_path):
    """Two of its trials; all strategies: tests/unit/strategies."""
    (tmp_path / "gpt.toml").write_text(GPT, encoding="utf-8")
    cli = cli_in(cache, tmp_path, forks)
    ran = cli.main("run", "gpt.toml", "--out", "run")
    assert ran.returncode == 0, ran.stderr
    compared = cli.main("compare", "run", "--json")
    rows = {row["local_strategy"]: row for row in json.loads(compared.stdout)["rows"]}
    assert rows.keys() == {"sequential", "pipeline"}
    assert rows["pipeline"]["equivalent"] is True, rows["pipeline"]["equivalence_reason"]
    assert rows["pipeline"]["target_reached"] == rows["sequential"]["target_reached"] == 1
    assert rows["pipeline"]["metrics"] == pytest.approx(rows["sequential"]["metrics"], rel=1e-3)


def test_biases_before_batch_normalisation_are_no_difference(cache, forks, tmp_path):
    (tmp_path / "cnn.py").write_text(CNN, "utf-8")
    spec = spec_text(
        *CNN_TRIALS.strip().splitlines(),
        workload='name = "cnn"; task = "cnn.py:Cnn"',
        tables="[telemetry]; enabled = false; [training]; max_steps = 18; global_batch = 16; "
        "warmup_steps = 1",
        repeats=1,
    )
    (tmp_path / "cnn.toml").write_text(spec, "utf-8")
    cli = cli_in(cache, tmp_path, forks)
    ran = cli.main("run", "cnn.toml", "--out", "run")
    assert ran.returncode == 0, ran.stderr
    rows = json.loads(cli.main("compare", "run", "--json").stdout)["rows"]
    assert [row["equivalence_reason"] for row in rows if row["equivalent"] is not True] == []
    [result] = (tmp_path / "run").glob("trials/*sequential*/result.json")
    noise = set(json.loads(result.read_text())["replayed"]["noise"])
    assert noise - {"1.running_mean", "4.running_mean"} == {"0.bias", "3.bias"}


def test_processes_train_the_example_equivalently(cache, forks, tiny_dataset, tmp_path):
    folder = shutil.copytree(EXAMPLE, tmp_path / "own-task")
    (folder / "dataset").symlink_to(tiny_dataset)
    cli = cli_in(cache, folder, forks)
    planned = json.loads(cli.main("plan", "own-task.toml", "--json").stdout)["trials"]
    assert {trial["local_strategy"] for trial in planned} == STRATEGIES

    spec = folder / "own-task.toml"
    common, *trials = spec.read_text("utf-8").split("[[trials]]")
    chosen = [t for t in trials if '"sequential"' in t or '"processes"' in t]
    spec.write_text("[[trials]]".join([common, *chosen]), "utf-8")
    ran = cli.main("run", "own-task.toml", "--out", "run")
    assert ran.returncode == 0, ran.stderr
    compared = cli.main("compare", "run", "--json")
    rows = json.loads(compared.stdout)["rows"]
    assert {row["local_strategy"] for row in rows} == {"sequential", "processes"}
    assert [row["equivalence_reason"] for row in rows if row["equivalent"] is not True] == []
    # all reach the same quality on the 12 samples that are not trained on
    assert {row["target_reached"] for row in rows} == {1}
    assert len({row["steps_to_target"] for row in rows}) == 1
    assert {round(row["metrics"]["loss"], 4) for row in rows} == {
        round(rows[0]["metrics"]["loss"], 4)
    }
    for trial in (folder / "run" / "trials").iterdir():
        assert (trial / "my_task.py").read_text() == (EXAMPLE / "my_task.py").read_text()
