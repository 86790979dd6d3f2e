"""Rows come back as the dataclasses that wrote them."""

import dataclasses
import json

import pytest

from paceline.base.errors import DataError
from paceline.measure.records.files import document, typed
from paceline.measure.records.rows import Outcome, RankEnvironment, WorkerEnvironment
from paceline.measure.records.tables import rows


@dataclasses.dataclass(frozen=True)
class Pressure:
    some_s: float
    full_s: float | None = None


@dataclasses.dataclass(frozen=True)
class Gpu:
    name: str
    power_watts: float | None = None


@dataclasses.dataclass(frozen=True)
class Tick:
    unix_s: float
    pressure: dict[str, Pressure] = dataclasses.field(default_factory=dict)
    gpus: list[Gpu] = dataclasses.field(default_factory=list)
    first: Gpu | None = None
    load: list[float] = dataclasses.field(default_factory=list)


FULL = Tick(
    unix_s=1.5,
    pressure={"cpu": Pressure(some_s=3.0), "io": Pressure(some_s=1.0, full_s=0.5)},
    gpus=[Gpu(name="one"), Gpu(name="two", power_watts=7.5)],
    first=Gpu(name="one"),
    load=[1.0, 2.0, 3.0],
)


@pytest.mark.parametrize("tick", [FULL, Tick(unix_s=0.0)])
def test_nested_dataclasses_survive_json(tick, tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(dataclasses.asdict(tick)) + "\n")
    assert rows(path, Tick) == (tick,)


def test_unknown_fields_are_ignored_at_every_depth(tmp_path):
    fields = {"unix_s": 1.0, "new": 1, "pressure": {"cpu": {"some_s": 1.0, "newer": 2}}}
    assert typed(fields, Tick, tmp_path).pressure == {"cpu": Pressure(some_s=1.0)}


def test_missing_field_names_the_file_and_the_row(tmp_path):
    with pytest.raises(DataError, match=r"outcome\.json.*Outcome.*trial_id"):
        typed({"schema": 1}, Outcome, tmp_path / "outcome.json")


@pytest.mark.parametrize("damaged", [{"cpu": 3}, [1], {"cpu": {"full_s": 1.0}}])
def test_nested_value_of_the_wrong_shape_is_bad_data(damaged, tmp_path):
    with pytest.raises(DataError, match="Tick"):
        typed({"unix_s": 1.0, "pressure": damaged}, Tick, tmp_path)


def test_no_file_gives_nothing(tmp_path):
    assert rows(tmp_path / "none.jsonl", Tick) == ()
    assert document(tmp_path / "none.json", Tick) is None


def test_rows_of_the_package_know_their_nested_types():
    worker = {"worker": 1, "thread_id": 2, "intraop_threads": 1, "affinity": [0]}
    fields = {
        **dict.fromkeys(("rank", "world_size", "local_rank", "node_index", "pid"), 0),
        **dict.fromkeys(("intraop_threads", "interop_threads"), 1),
        **dict.fromkeys(("host", "cpu_model", "precision", "memory_format", "transport"), "a"),
        **dict.fromkeys(("interface", "initial_weights_sha256"), "b"),
        **dict.fromkeys(("clock_offset_s", "clock_error_s"), 0.0),
        "omp_environment": {},
        "affinity": [],
        "cgroup_cpu_limit": None,
        "cgroup_memory_limit_bytes": None,
        "versions": {},
        "workers": [worker],
    }
    environment = typed(fields, RankEnvironment, "file")
    assert environment.workers == [WorkerEnvironment(**worker)]
