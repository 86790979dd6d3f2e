"""Keys about buckets of gradients and about sufficient factors."""

import pytest
from tests.support.specs import spec_text

from paceline.base.errors import UsageError
from paceline.plan.spec.loading import parse_spec
from paceline.plan.spec.rules.trial import reduction_of
from paceline.plan.trials.planning import plan_trials

SPEC = spec_text('launcher = "mpi"', tables='[network]; interface = "eth0"')
KEYS = ("bucket_mb", "buckets_in_flight", "bucket_wait_ms")


def parsed(**values):
    lines = [f"{k} = {v}" if isinstance(v, int) else f'{k} = "{v}"' for k, v in values.items()]
    return parse_spec(SPEC + "\n".join(lines) + "\n", "mine.toml")


def trial_of(**values):
    trials = plan_trials(parsed(**values), {"tiny": "data"}, 4)
    (trial,) = [t for t in trials if not t.is_baseline and not t.repeat]
    return trial


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize(
    "where",
    [
        {"local_strategy": "processes"},  # in the memory of one node
        {"local_strategy": "processes", "transport": "shared"},
        {"local_strategy": "processes", "nodes": 2, "ranks_per_node": 2},  # hierarchical
        {"local_strategy": "threads", "nodes": 2, "replicas": 2},
        {"local_strategy": "pipeline"},
        {"local_strategy": "intraop"},
        {"local_strategy": "processes", "transport": "mpi", "averaging_period_steps": 4},
    ],
)
def test_key_about_buckets_is_refused_where_there_are_none(key, where):
    with pytest.raises(UsageError, match=f"{key}: has no meaning"):
        parsed(**{key: 2}, **where)


@pytest.mark.parametrize(
    "where",
    [
        {"local_strategy": "processes"},
        {"local_strategy": "processes", "transport": "mpi"},
        {"local_strategy": "processes", "nodes": 2, "ranks_per_node": 2},
        {"local_strategy": "processes", "nodes": 2, "ranks_per_node": 2, "reduction": "zero-1"},
        {"local_strategy": "processes", "transport": "mpi", "averaging_period_steps": 4},
        {"local_strategy": "threads"},
        {"local_strategy": "pipeline"},
        {"local_strategy": "pipeline", "schedule": "pipedream"},
        {"local_strategy": "parameter-server"},
    ],
)
def test_a_request_reduces_as_its_planned_trial(where):
    (request,) = [r for r in parsed(**where).trials if not r.is_baseline]
    assert reduction_of(request) == trial_of(**where).reduction


def test_reduction_is_not_known_before_a_search_and_with_counts_that_cannot_be():
    (request,) = [r for r in parsed(local_strategy="processes").trials if not r.is_baseline]
    for change in ({"local_strategy": "best"}, {"ranks_per_node": 1}):
        assert reduction_of(request.model_copy(update=change)) is None


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize(
    "where",
    [
        {"local_strategy": "processes", "transport": "mpi", "ranks_per_node": 2},
        {"local_strategy": "processes", "transport": "gloo", "ranks_per_node": 2},
        {"local_strategy": "processes", "nodes": 2, "reduction": "flat", "ranks_per_node": 2},
        {"local_strategy": "sequential", "nodes": 2},
        {"local_strategy": "intraop", "nodes": 2, "threads_per_rank": 2},
    ],
)
def test_key_about_buckets_is_kept_where_ranks_reduce_in_buckets(key, where):
    assert trial_of(**{key: 2}, **where).option(key) == 2


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"buckets_in_flight": 2}, "expected no buckets_in_flight"),
        ({"compression": "bf16"}, "expected no compression"),
        ({"transport": "nccl", "device": "cuda", "threads_per_rank": 1}, 'expected device = "cpu"'),
    ],
)
def test_wait_is_refused_beside_what_excludes_it(said, reason):
    where = {"local_strategy": "processes", "transport": "mpi", "ranks_per_node": 2, **said}
    with pytest.raises(UsageError, match=f"bucket_wait_ms: {reason}"):
        parsed(bucket_wait_ms=2, **where)


def test_wait_is_a_part_of_the_name():
    trial = trial_of(local_strategy="processes", transport="mpi", bucket_wait_ms=3)
    assert trial.configuration.endswith(".w3")
    assert "3 ms wait" in trial.labels
    assert trial.is_exact


def test_buckets_are_of_25_mb_where_nothing_is_said():
    found = plan_trials(parsed(local_strategy="processes", transport="mpi"), {"tiny": "data"}, 4)
    assert {trial.option("bucket_mb") for trial in found} == {None, 25.0}


TWO_NODES = {"local_strategy": "sequential", "nodes": 2}


@pytest.mark.parametrize(
    ("where", "reason"),
    [
        ({"compression": "bf16"}, "compression compresses gradients"),
        ({"device": "cuda"}, 'needs device = "cpu"'),
        ({"averaging_period_steps": 4, "local_strategy": "processes"}, "exchanges weights"),
        ({"transport": "nccl", "device": "cuda"}, "needs a second process group"),
    ],
)
def test_factors_are_refused_where_no_gradients_are_sent(where, reason):
    with pytest.raises(UsageError, match=f'sufficient_factors: "always" .*{reason}'):
        parsed(**{**TWO_NODES, **where}, sufficient_factors="always")


def test_setting_of_factors_is_auto_and_part_of_the_name_where_it_is_not():
    settings = {}
    for setting in (None, "always", "never"):
        said = {} if setting is None else {"sufficient_factors": setting}
        trial = trial_of(**TWO_NODES, **said)
        settings[setting] = trial.option("sufficient_factors")
        assert ("factors" in trial.configuration) == (setting is not None)
        assert trial.is_exact
    assert settings == {None: "auto", "always": "always", "never": "never"}
