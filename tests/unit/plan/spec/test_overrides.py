"""Changes to a spec from the command line."""

from __future__ import annotations

import tomllib

import pytest
from tests.support.specs import spec_text

from paceline.base.errors import UsageError
from paceline.plan.spec.loading import apply_settings, load_spec, parse_spec

SPEC = spec_text(
    'launcher = "mpi"; local_strategy = "processes"; transport = "mpi"; ranks_per_node = 2; '
    'mpi_parameters = { btl_tcp_links = "2" }',
    tables="[training]; max_steps = 20",
)


@pytest.mark.parametrize(
    ("setting", "path", "value"),
    [
        ("training.max_steps=8", ["training", "max_steps"], 8),
        ("limits.trial_s = 2.5", ["limits", "trial_s"], 2.5),
        ("workloads.0.global_batch=16", ["workloads", 0, "global_batch"], 16),
        ('training.precision="bf16"', ["training", "precision"], "bf16"),
        ('only=["*.mpi.*"]', ["only"], ["*.mpi.*"]),
        ("mpi_parameters={a='b=c'}", ["mpi_parameters"], {"a": "b=c"}),
        ('spark.conf."spark.a=b"="4g"', ["spark", "conf", "spark.a=b"], "4g"),
        ("trials.1.mpi_parameters={ x = '1' }", ["trials", 1, "mpi_parameters"], {"x": "1"}),
    ],
)
def test_key_is_set_to_a_value_of_toml(setting, path, value):
    document = tomllib.loads(SPEC)
    assert apply_settings(document, [setting]) == []
    for part in path:
        document = document[part]
    assert document == value


def test_all_faults_of_changes_and_spec_come_at_once():
    wrong = [
        "training.max_steps",
        "training.precision=bf16",
        "workloads.3.data='x'",
        "workloads.1.data='x'",
        "name.x=1",
        "seed=1\nrepeats=2",
        "training.max_stepz=8",
        "repeats=0",
    ]
    with pytest.raises(UsageError) as raised:
        load_spec("quickstart", wrong)
    message = str(raised.value)
    assert "8 faults" in message
    for part in (
        "--set training.max_steps: expected KEY=VALUE",
        """a string needs quotes, as in 'training.precision="bf16"'""",
        "expected a number from 0 to 0 after workloads, got 3",
        "expected a number from 0 to 0 after workloads, got 1",
        "name is a value, expected a table or an array",
        "--set seed=1\nrepeats=2: expected a TOML value",
        'training.max_stepz: no such key. Did you mean "max_steps"?',
        "repeats: input should be greater than or equal to 1, got 0",
    ):
        assert part in message


def test_changed_text_is_a_spec_that_says_what_was_changed(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(SPEC)
    plain = load_spec(str(path))
    assert plain.text == SPEC
    changed = load_spec(str(path), ["training.max_steps=8", "repeats=5"])
    assert changed.text.startswith(f"# {path} with training.max_steps=8; repeats=5\n")
    assert parse_spec(changed.text, "text") == changed.experiment
    assert changed.experiment.training.max_steps == 8
    assert changed.experiment.repeats == 5
    assert changed.experiment.trials == plain.experiment.trials
