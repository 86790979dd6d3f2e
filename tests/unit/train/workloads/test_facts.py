"""Facts of models are derived from the models, without torch in the process that asks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from paceline.base.errors import EnvironmentLacks, UsageError
from paceline.plan.spec import model_facts as kept_facts
from paceline.plan.spec.extensions import WORKLOADS
from paceline.plan.spec.model_facts import ModelFacts, model_facts
from paceline.train.data.register import register
from paceline.train.workloads.build import make_task, on_meta_device
from paceline.train.workloads.facts import derive_facts

TINY_MODEL = "paceline.train.workloads.convolutional:TinyAlexNet"

# Published numbers of parameters with 1000 classes, and indexes of the layers that do not work in
# place, counted by hand in torchvision's listing (features, avgpool, flatten, classifier).
ALEXNET = 61_100_840, (2, 3, 5, 6, 8, 10, 12, 13, 14, 15, 16, 18, 19, 21)
VGG16 = (
    138_357_544,
    (2, 4, 5, 7, 9, 10, 12, 14, 16, 17, 19, 21, 23, 24, 26, 28, 30, 31, 32, 33, 35, 36, 38, 39),
)
# 3*16*25+16 + 16*32*9+32 + 32*32*9+32 + 128*64+64 + 64*64+64 + 64*1000+1000
TINY = 92_520, (2, 3, 5, 6, 8, 9, 10, 11, 12, 14, 15, 17)


@pytest.mark.parametrize(
    ("workload", "expected"), [("simple-big", ALEXNET), ("complex-small", VGG16), ("tiny", TINY)]
)
def test_facts_are_those_of_the_published_models(
    workload: str, expected: tuple[int, tuple[int, ...]]
) -> None:
    facts = derive_facts(WORKLOADS.get(workload).implementation)
    assert (facts.parameters, facts.split_points) == expected
    assert facts.parameter_bytes == 4 * facts.parameters


def test_deriving_takes_no_memory_for_weights() -> None:
    model = on_meta_device(make_task("complex-small", classes=1000))
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


def test_another_process_derives_the_same_and_torch_stays_out_of_this_one(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from paceline.plan.spec.extensions import WORKLOADS\n"
        "print(WORKLOADS.get('tiny').facts().model_dump_json())\n"
        "assert not {'torch', 'numpy'} & sys.modules.keys()\n"
    )
    environment = os.environ | {"PACELINE_CACHE": str(tmp_path)}
    expected = derive_facts(TINY_MODEL).model_dump_json()
    for _ in range(2):  # derived, then kept
        found = subprocess.check_output(
            [sys.executable, "-c", program], text=True, timeout=120, env=environment
        )
        assert found.strip() == expected
        assert len(list(tmp_path.glob("facts/*"))) == 1


@pytest.fixture
def derivations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Return the derivations since; `model_facts` keeps its results in `tmp_path`."""
    made: list[list[str]] = []

    def derived(words: list[str]) -> str:
        made.append(words)
        return derive_facts(words[0]).model_dump_json()

    monkeypatch.setattr(kept_facts, "_derived", derived)
    monkeypatch.setattr(kept_facts, "default_cache_dir", lambda: tmp_path)
    return made


def facts_of_a_new_command(options: str = "{}") -> ModelFacts:
    model_facts.cache_clear()
    return model_facts(TINY_MODEL, options)


def test_facts_of_our_models_are_kept_until_a_source_or_torch_changes(
    derivations: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert facts_of_a_new_command() == facts_of_a_new_command()
    assert len(derivations) == 1
    monkeypatch.setattr(kept_facts, "_source_checksum", lambda: "changed")
    facts_of_a_new_command()
    assert len(derivations) == 2
    facts_of_a_new_command('{"dropout": 0.1}')
    assert len(derivations) == 3


def test_checksum_follows_every_source_and_the_version_of_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def checksum() -> str | None:
        kept_facts._source_checksum.cache_clear()
        return kept_facts._source_checksum()

    with monkeypatch.context() as patch:
        patch.setattr(kept_facts, "_PACKAGE", tmp_path)
        assert checksum() is None  # an archive
        (tmp_path / "a.py").write_text("one")
        found = {checksum()}
        (tmp_path / "a.py").write_text("two")
        found.add(checksum())
        (tmp_path / "a.py").rename(tmp_path / "b.py")
        found.add(checksum())
        patch.setattr(kept_facts.metadata, "version", lambda _name: "99.0")
        found.add(checksum())
    kept_facts._source_checksum.cache_clear()
    assert len(found) == 4


@pytest.mark.parametrize("content", [b"", b"{", b'{"source": "x", "facts": {"parameters": 1}}'])
def test_damaged_facts_are_derived_again(
    derivations: list[list[str]], tmp_path: Path, content: bytes
) -> None:
    right = facts_of_a_new_command()
    [file] = tmp_path.glob("facts/*")
    file.write_bytes(content)
    assert facts_of_a_new_command() == right
    assert len(derivations) == 2


def test_facts_of_a_users_model_are_not_kept(derivations: list[list[str]], tmp_path: Path) -> None:
    model_facts.cache_clear()
    with pytest.raises(Exception, match="no_such_module"):
        model_facts("no_such_module:Net")
    assert derivations
    assert not list(tmp_path.glob("facts/*"))


def test_a_model_that_cannot_be_built_is_reported_with_the_reason() -> None:
    with pytest.raises(EnvironmentLacks, match=r"model no_such_module:Net: .*No module named"):
        model_facts("no_such_module:Net")


SCHEDULED = """
import torch
from torch import nn
import paceline

class Scheduled(paceline.Task):
    input_field, target_field = "x", "y"

    def model(self):
        return nn.Linear(3, 2)

    def schedule(self, optimizer):
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, self.settings.steps)

class WithItems(Scheduled):
    def dataset(self):
        return [((0.0, 0.0, 0.0), 1)] * 7
"""


def test_facts_have_the_fields_and_the_samples_of_a_task(tmp_path: Path) -> None:
    """Its schedule allows no step beyond those of the training."""
    file = tmp_path / "scheduled.py"
    file.write_text(SCHEDULED)
    facts = derive_facts(f"{file}:Scheduled")
    assert (facts.input_field, facts.target_field, facts.items) == ("x", "y", None)
    assert facts.sharding_fault is None
    assert derive_facts(f"{file}:WithItems").items == 7


BRANCHED = """
import torch
from torch import nn
import paceline

class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, inputs):
        return self.second(inputs + self.first(inputs))

class Branched(paceline.Task):
    input_field, target_field = "x", "y"

    def model(self):
        return Network()
"""


def test_the_shape_of_inputs_comes_from_the_data_set(tmp_path: Path) -> None:
    file, folder = tmp_path / "branched.py", tmp_path / "set"
    file.write_text(BRANCHED)
    unknown = derive_facts(f"{file}:Branched", data=str(folder))  # there is none yet
    assert "example_input" in (unknown.splitting_fault or "")
    folder.mkdir()
    rows = pa.table({"x": pa.array([[1.0, 2.0, 3.0]] * 4), "y": [0, 1, 0, 1]})
    pq.write_table(rows, folder / "rows.parquet")
    register(folder)
    known = derive_facts(f"{file}:Branched", data=str(folder))
    assert (known.splitting_fault, known.split_points) == (None, (1,))


FAULTY = """
import torch
from torch import nn
from torch.nn.functional import dropout
import paceline

class Faulty(paceline.Task):
    input_field, target_field = "x", "y"

    def model(self):
        return nn.Linear(3, 2)

    def example_input(self):
        return torch.zeros(1, 3)

class Network(nn.Module):
    def __init__(self, p):
        super().__init__()
        self.p, self.layer, self.kept = p, nn.Linear(3, 2), nn.Dropout(0.5)
        self.norm = nn.BatchNorm1d(2)

    def forward(self, inputs):
        return dropout(self.kept(self.norm(self.layer(inputs))), self.p, self.training)

class FunctionalDropout(Faulty):
    def model(self):
        return Network(0.5)

class NoDropout(Faulty):
    def model(self):
        return nn.Sequential(Network(0.0), nn.Unflatten(1, (2, 1, 1)), nn.BatchNorm2d(2),
                             nn.Upsample(scale_factor=2), nn.BatchNorm2d(2))

class Closure(Faulty):
    def optimizer(self, parameters):
        return torch.optim.LBFGS([p for _, p in parameters])

class Plateau(Faulty):
    def schedule(self, optimizer):
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)

class Sparse(Faulty):
    def model(self):
        return nn.Sequential(nn.Embedding(4, 2, sparse=True))

class Double(Faulty):
    def model(self):
        return nn.Linear(3, 2).double()
"""


@pytest.fixture
def faulty(tmp_path: Path) -> str:
    file = tmp_path / "faulty.py"
    file.write_text(FAULTY)
    return str(file)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("FunctionalDropout", r"forward draws random numbers \(bernoulli_\).* use nn.Dropout"),
        ("Closure", r"cannot take a step .* expected ones whose step\(\) needs no argument"),
        ("Plateau", r"cannot take a step .* neither a closure nor a metric"),
        ("Sparse", r"layer 0: its gradient is sparse.* expected sparse=False"),
    ],
)
def test_what_no_layout_can_train_is_refused(faulty: str, task: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        derive_facts(f"{faulty}:{task}")


def test_shards_need_weights_in_float32(faulty: str) -> None:
    fault = derive_facts(f"{faulty}:Double").sharding_fault or ""
    assert fault.startswith("parameter weight is torch.float64, expected torch.float32; use")


def test_layers_that_cannot_normalise_a_single_sample_are_known(faulty: str) -> None:
    facts = derive_facts(f"{faulty}:NoDropout")
    assert facts.batch_norms == ("0.norm", "2", "4")
    assert facts.batch_norms_of_several == ("0.norm", "2")
