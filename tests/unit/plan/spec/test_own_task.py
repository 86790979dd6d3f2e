"""Specs with a task of the user: what is planned, and what is refused before anything runs."""

from __future__ import annotations

import datetime as dt
import hashlib
from typing import Any

import pytest

from paceline.base.errors import UsageError
from paceline.plan.spec import descriptors
from paceline.plan.spec.loading import check_spec
from paceline.plan.spec.model_facts import ModelFacts
from paceline.plan.spec.values import Target
from paceline.plan.trials.planning import plan_trials
from paceline.plan.trials.trial import Trial

FACTS = {"parameters": 10, "parameter_bytes": 40, "split_points": (1, 2)}


@pytest.fixture
def facts(monkeypatch):
    """Sets what the model's facts are, instead of deriving them in another process."""

    def known(**values: Any) -> list[tuple[str, str, str, int]]:
        asked = []

        def model_facts(path: str, options: str, data: str, samples: int) -> ModelFacts:
            asked.append((path, options, data, samples))
            return ModelFacts(**FACTS, **values)

        monkeypatch.setattr(descriptors, "model_facts", model_facts)
        return asked

    return known


@pytest.fixture
def spec(tmp_path, monkeypatch):
    """A spec with a task in the current directory and the baseline; more trials can be added."""
    (tmp_path / "my_task.py").write_text("number = 1\n")
    monkeypatch.chdir(tmp_path)

    def made(*trials: dict[str, Any], **workload: Any) -> dict[str, Any]:
        own = {"name": "mine", "task": "my_task.py:Mine", "data": "d", "max_steps": 9}
        return {
            "schema": 2,
            "name": "own",
            "workloads": [{k: v for k, v in {**own, **workload}.items() if v is not None}],
            "trials": [{"launcher": "local", "local_strategy": "sequential"}, *trials],
        }

    return made


def planned(document: dict[str, Any]) -> list[Trial]:
    folders = dict.fromkeys(("mine", "tiny", "deeplab"), "/d")
    return plan_trials(check_spec(document, "spec"), folders, 4)


def by_strategy(document: dict[str, Any]) -> dict[str, Trial]:
    return {trial.local_strategy: trial for trial in planned(document)}


def faults(document: dict[str, Any]) -> str:
    with pytest.raises(UsageError) as caught:
        planned(document)
    return str(caught.value)


def test_trial_names_the_file_its_checksum_and_the_options(spec, facts, tmp_path):
    asked = facts()
    trial = planned(spec(options={"width": 3, "depth": 2}))[0].training
    assert (trial.workload, trial.model) == ("mine", "Mine")
    assert trial.task == f"{tmp_path}/my_task.py:Mine"
    assert trial.task_sha256 == hashlib.sha256(b"number = 1\n").hexdigest()
    assert trial.options == {"width": 3, "depth": 2}
    assert (trial.image_size, trial.global_batch) == (224, 32)
    options = '{"depth": 2, "width": 3}'  # in one order, so that facts are derived once
    assert set(asked) == {(f"{tmp_path}/my_task.py:Mine", options, f"{tmp_path}/d", 256)}


def test_a_task_needs_a_data_set(spec, facts):
    facts()
    assert "workloads[1].data: a task of your own needs samples" in faults(spec(data=None))


def test_options_that_json_cannot_hold_are_refused_with_their_place(spec, facts):
    facts()
    document = spec(options={"start": dt.date(2024, 1, 1)})
    assert "workloads[1].options.start" in faults(document)


def test_options_that_a_workload_does_not_have_are_refused(spec):
    document = spec(task=None, name="tiny", options={"width": 3})
    message = faults(document)
    assert (
        "workloads[1].options: model paceline.train.workloads.convolutional:TinyAlexNet" in message
    )
    assert "width" in message


def test_data_of_the_spec_replaces_the_samples_of_the_task(spec, facts):
    facts(items=40)
    own, given = (planned(spec(data=data))[0].training for data in (None, "d"))
    assert (own.dataset, own.items) == ("", 40)
    assert (given.dataset, given.items) == ("/d", None)


def test_a_workload_is_a_script_or_a_task(spec):
    document = spec(script="train.py", data=None)
    assert "workloads[1].task: a script decides this itself; remove it" in faults(document)


@pytest.mark.parametrize(
    ("trial", "known", "message"),
    [
        ({"local_strategy": "pipeline", "stages": 2},
         {"splitting_fault": "it is no sequence"},
         'local_strategy "pipeline": it is no sequence'),
        ({"local_strategy": "threads", "replicas": 2},
         {"sharding_fault": "its optimiser is odd"},
         ('local_strategy "threads" divides the update of Mine among workers, but its optimiser '
         "is odd")),
        ({"local_strategy": "hybrid", "replicas": 2, "stages": 2, "micro_batches": 4},
         {"batch_norms": ("1.norm",)},
         ("micro_batches: layer 1.norm of Mine normalises over the whole batch, so expected 1, "
         "got 4")),
        ({"local_strategy": "processes", "ranks_per_node": 2, "batch_norm": "per-replica"},
         {"batch_norms": ()},
         'batch_norm: Mine has no batch normalisation, so "per-replica" has no meaning'),
        ({"local_strategy": "processes", "transport": "gloo", "ranks_per_node": 2,
          "averaging_period_steps": 2},
         {"batch_norms": ("1.norm",)},
         ("batch_norm: layer 1.norm of Mine normalises over the whole batch, but local SGD "
          'computes its parts at different times; use batch_norm = "per-replica", or remove '
          "averaging_period_steps")),
        ({"launcher": "spark", "transport": "spark-rounds", "local_strategy": "processes",
          "ranks_per_node": 2, "batch_norm": "per-replica"},
         {"batch_norms": ("1.norm",)},
         'transport "spark-rounds" sends weights only, but layer 1.norm of Mine has running'),
        ({"local_strategy": "threads", "replicas": 2},
         {"unused_parameter": "0.scale"},
         ("workers, but parameter 0.scale gets no gradient from the model's output; use it in "
         "the forward, remove it, or set requires_grad=False; or use a strategy")),
        ({"local_strategy": "pipeline", "stages": 2, "schedule": "pipedream",
          "micro_batches": 4},
         {"clip_norm": 1.0},
         'clip_norm: Mine limits the norm of the whole gradient, which "pipeline" does not know'),
        ({"local_strategy": "pipeline", "stages": 2, "schedule": "pipedream",
          "micro_batches": 4},
         {"tied_layers": ((0, 2),)},
         ('schedule: with "pipedream" a parameter belongs to one stage, but layers 0 and 2 of '
         'Mine share one; use "1f1b"')),
        ({"local_strategy": "pipeline", "split_points": [1], "schedule": "pipedream",
          "micro_batches": 4},
         {"tied_layers": ((0, 1),)},
         "but layers 0 and 1 of Mine share one"),
        ({"local_strategy": "pipeline", "stages": 3, "schedule": "pipedream"},
         {"batch_norms": ("1.norm",)},
         ('so there is one micro-batch, but "pipedream" needs at least 2 with 3 stages; use '
         'stages = 2, or "1f1b"')),
        ({"launcher": "spark", "local_strategy": "processes", "transport": "spark-rounds",
          "ranks_per_node": 2},
         {"optimizer": "AdamW"},
         'transport "spark-rounds" averages weights and the momentum of SGD'),
    ],
)  # fmt: skip
def test_strategy_that_cannot_train_the_task_is_refused(spec, facts, trial, known, message):
    facts(**known)
    assert message in faults(spec({"launcher": "local", **trial}))


SERVER = {"launcher": "local", "local_strategy": "parameter-server", "ranks_per_node": 2}
HOGWILD = {"launcher": "local", "local_strategy": "hogwild", "ranks_per_node": 2}
PIPEDREAM = {
    "launcher": "local", "local_strategy": "pipeline", "stages": 2, "schedule": "pipedream",
    "oversubscribe": True,
}  # fmt: skip


def test_all_faults_of_asynchronous_methods_are_refused_at_once(spec, facts):
    facts(clip_norm=0.5, unused_parameter="0.scale", batch_norms=("1.norm",))
    pipedream = {**PIPEDREAM, "activation_checkpointing": True}
    message = faults(spec(SERVER, {**SERVER, "update_mode": "shat"}, HOGWILD, pipedream))
    lines = [line.strip(" -").split(": ")[:3] for line in message.splitlines()[1:]]
    expected = [
        (place, key)
        for place in (2, 3, 4, 5)
        for key in ("clip_norm", "local_strategy", "batch_norm", "activation_checkpointing")
        if key != ("batch_norm" if place == 5 else "activation_checkpointing")
    ]
    found = [(int(where[7]), key.split()[0]) for where, key, _ in (
        (line[0], line[1], line[2:]) for line in lines
    )]  # fmt: skip
    assert found == expected
    assert 'layer 1.norm of Mine normalises over the whole batch, but "hogwild"' in message


def test_asynchronous_methods_normalise_within_a_replica_and_pipedream_over_the_batch(spec, facts):
    facts(batch_norms=("1.norm",), tied_layers=((1, 2),))
    server, hogwild = ({**each, "batch_norm": "per-replica"} for each in (SERVER, HOGWILD))
    trials = by_strategy(spec(server, hogwild, {**PIPEDREAM, "split_points": [1]}))
    assert len(trials) == 4
    assert trials["pipeline"].training.batch_norm == "global"
    assert trials["pipeline"].option("micro_batches") == 1


def test_batch_normalisation_decides_what_the_spec_leaves_open(spec, facts):
    facts(batch_norms=("1.norm",))
    hybrid = {"launcher": "local", "local_strategy": "hybrid", "replicas": 2, "stages": 2}
    own = {"launcher": "local", "local_strategy": "threads", "replicas": 2}
    document = spec({**hybrid, "oversubscribe": True}, {**own, "batch_norm": "per-replica"})
    document["training"] = {"batch_norm": "global"}
    trials = by_strategy(document)
    assert trials["hybrid"].option("micro_batches") == 1
    assert trials["hybrid"].is_exact
    threads = trials["threads"]
    assert threads.configuration.endswith(".bn-per-replica")
    assert threads.labels == ["own BN"]
    assert not threads.is_exact


def test_batch_normalisation_allows_micro_batches_with_statistics_of_their_own(spec, facts):
    facts(batch_norms=("1.norm",))
    pipeline = {"launcher": "local", "local_strategy": "pipeline", "stages": 2}
    document = spec({**pipeline, "micro_batches": 4})
    document["training"] = {"batch_norm": "per-replica"}
    trials = by_strategy(document)
    assert trials["sequential"].training.batch_norm == "global"
    assert trials["pipeline"].training.batch_norm == "per-replica"
    assert not trials["pipeline"].is_exact


def test_strategies_that_do_not_need_a_condition_are_planned(spec, facts):
    facts(splitting_fault="no", sharding_fault="no", batch_norms=("1",), optimizer="LBFGS")
    gloo = {
        "launcher": "local", "local_strategy": "processes", "transport": "gloo",
        "ranks_per_node": 2,
    }  # fmt: skip
    assert len(planned(spec(gloo, {"launcher": "local", "local_strategy": "intraop"}))) == 3 * 5


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, None),
        ({"held_out_samples": 4}, Target(metric="loss", at_most=1)),
        ({"held_out_samples": 4, "target": {"metric": "loss", "at_most": 2}},
         Target(metric="loss", at_most=2)),
    ],
)  # fmt: skip
def test_target_is_that_of_the_spec_or_else_of_the_task(spec, facts, given, expected):
    facts(target=Target(metric="loss", at_most=1))
    assert planned(spec(**given))[0].training.target == expected


def test_named_workload_has_samples_options_and_batch_normalisation_of_its_task(spec, facts):
    asked = facts(items=24, batch_norms=("low.1",), target=Target(metric="mean_iou", at_least=1))
    pipeline = {"launcher": "local", "local_strategy": "pipeline", "stages": 2}
    named: dict[str, Any] = {"task": None, "name": "deeplab", "options": {"width": 8}}
    named |= {"samples": 24, "held_out_samples": 4}
    trials = by_strategy(spec(pipeline, **named, data=None))
    given = planned(spec(pipeline, **named, data="d"))
    assert trials["pipeline"].option("micro_batches") == 1
    training = trials["sequential"].training
    assert (training.items, training.dataset, training.options) == (24, "", {"width": 8})
    assert training.target == Target(metric="mean_iou", at_least=1)
    assert {(options, samples) for _, options, data, samples in asked if not data} == {
        ('{"width": 8}', 24)
    }
    assert (given[0].training.items, given[0].training.dataset) == (None, "/d")


@pytest.mark.parametrize(
    ("samples", "max_steps", "is_refused"),
    [(35, 4, False), (35, 5, True), (35, None, True), (36, None, False)],
)
def test_replica_that_would_normalise_a_single_sample_is_refused(
    spec, facts, samples, max_steps, is_refused
):
    facts(batch_norms=("1.norm",), batch_norms_of_several=("1.norm",), items=samples)
    threads = {"launcher": "local", "local_strategy": "threads", "replicas": 2}
    document = spec(threads, data=None, max_steps=max_steps, global_batch=8, epochs=1)
    document["training"] = {"batch_norm": "per-replica"}
    if is_refused:
        assert (
            "batch_norm: layer 1.norm of Mine cannot normalise a single sample, but a batch of 3 "
            "leaves one to some of 2 replicas with 1 micro-batch(es)"
        ) in faults(document)
    else:
        assert planned(document)
