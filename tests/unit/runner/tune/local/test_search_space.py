import pytest

from paceline.plan.spec.extensions import STRATEGIES
from paceline.runner.tune.local import local_requests, neighbouring_split_points
from paceline.train.strategies.pipeline.descriptor import searched_layouts


def layouts(strategy, cores, *keys, **options):
    requests = local_requests(
        strategy, cores=cores, batch=64, oversubscribe=options.get("oversubscribe", False)
    )
    return {tuple(getattr(r, k, None) for k in keys) for r in requests[1:]}


@pytest.mark.parametrize("strategy", STRATEGIES.names())
def test_default_comes_first_and_says_nothing_of_its_layout(strategy):
    first = local_requests(strategy, cores=4, batch=64, oversubscribe=False)[0]
    assert first.model_dump(exclude_unset=True) == {"launcher": "local", "local_strategy": strategy}


@pytest.mark.parametrize("cores", [1, 2, 4, 8])
def test_intraop_takes_every_core(cores):
    assert layouts("intraop", cores, "threads_per_rank") == {(cores,)}


@pytest.mark.parametrize(
    ("cores", "expected"),
    [(1, set()), (2, {2}), (4, {2, 4}), (6, {2, 3, 6}), (8, {2, 4, 8})],
)
def test_replicas_times_threads_are_the_cores(cores, expected):
    # threads_per_rank of `threads` counts those of all its replicas
    assert layouts("threads", cores, "replicas", "threads_per_rank") == {
        (k, cores) for k in expected
    }
    assert layouts("processes", cores, "ranks_per_node", "threads_per_rank") == {
        (k, cores // k) for k in expected
    }


@pytest.mark.parametrize(
    ("cores", "expected"),
    [
        (1, set()),
        (2, {(2, 1)}),
        (4, {(2, 2), (3, 1), (4, 1)}),
        (8, {(2, 4), (3, 2), (4, 2), (5, 1), (6, 1), (7, 1), (8, 1)}),
        (16, {(2, 8), (3, 5), (4, 4), (5, 3), (6, 2), (7, 2), (8, 2)}),
    ],
)
def test_stages_of_a_pipeline_fit_the_cores(cores, expected):
    assert layouts("pipeline", cores, "stages", "threads_per_rank") == expected


def test_pipeline_tries_every_schedule_balance_and_number_of_micro_batches():
    assert layouts("pipeline", 2, "micro_batches", "schedule", "balance") == {
        (m, schedule, balance)
        for m in (2, 4, 8, 16)
        for schedule in ("gpipe", "1f1b")
        for balance in ("time", "size")
    }


def test_no_more_micro_batches_than_a_replica_has_samples():
    requests = local_requests("pipeline", cores=2, batch=5, oversubscribe=False)
    assert {r.micro_batches for r in requests[1:]} == {2, 4}
    requests = local_requests("hybrid", cores=4, batch=8, oversubscribe=False)
    assert {r.micro_batches for r in requests[1:]} == {2, 4}


@pytest.mark.parametrize(
    ("cores", "expected"),
    [
        (1, {(2, 2, 1)}),
        (2, {(2, 2, 1)}),
        (4, {(2, 2, 1)}),
        (5, {(2, 2, 1)}),
        (6, {(2, 3, 1), (3, 2, 1)}),
        (8, {(2, 2, 2), (2, 4, 1), (4, 2, 1)}),
    ],
)
def test_hybrid_uses_as_many_cores_as_it_can(cores, expected):
    assert set(searched_layouts(cores)) == expected


@pytest.mark.parametrize("cores", [1, 2, 4, 8])
@pytest.mark.parametrize("strategy", STRATEGIES.names())
def test_only_what_wants_more_cores_than_there_are_oversubscribes(strategy, cores):
    for request in local_requests(strategy, cores=cores, batch=64, oversubscribe=True):
        fits = cores >= {"sequential": 1, "intraop": 1, "hybrid": 4}.get(strategy, 2)
        assert request.oversubscribe is not fits


def test_a_cut_moves_to_the_place_before_and_behind():
    assert neighbouring_split_points([6], [1, 3, 4, 6, 7]) == [(4,), (7,)]


def test_cuts_do_not_leave_the_model_or_meet():
    assert neighbouring_split_points([1, 3], [1, 3, 4]) == [(1, 4)]
    assert neighbouring_split_points([1], [1]) == []
