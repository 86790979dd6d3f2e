"""`python -m paceline.runner.launchers.local` by hand: one rank here, or a process per rank."""

import pytest
from tests.support.job_specs import job_words

from paceline.runner.job.rank_status import RankEnd
from paceline.runner.launchers import local as module


@pytest.fixture
def started(monkeypatch, tmp_path):
    """What is started by the words, as ("children" | "here", ranks)."""

    def start(keys):
        words = job_words(tmp_path, "local", data=tmp_path, oversubscribe=True, **keys)
        seen = []

        def run_ranks(job):
            seen.append(("children", job.trial.placement.ranks))
            return RankEnd(rank=0)

        def run_rank(_job, context, _watched, **_rest):
            seen.append(("here", context.world_size))
            return RankEnd(rank=0)

        words += ["--out", str(tmp_path / "run")]
        monkeypatch.setattr("sys.argv", ["paceline.runner.launchers.local", *words])
        monkeypatch.setattr(module, "run_ranks", run_ranks)
        monkeypatch.setattr(module, "run_rank", run_rank)
        assert module.main() == 0
        return seen

    return start


@pytest.mark.parametrize(
    ("strategy", "keys", "expected"),
    [
        ("sequential", {}, ("here", 1)),
        ("threads", {"replicas": 2}, ("here", 1)),
        ("processes", {"ranks_per_node": 2}, ("children", 2)),
        ("processes", {"replicas": 2}, ("children", 2)),
        ("pipeline", {"stages": 2}, ("children", 2)),
        ("hybrid", {"stages": 2, "replicas": 2}, ("children", 4)),
    ],
)
def test_ranks_by_hand_are_those_of_the_strategy(strategy, keys, expected, started):
    assert started({"local_strategy": strategy, **keys}) == [expected]


def test_child_has_the_world_of_its_strategy(started, monkeypatch):
    for name, value in (("RANK", "1"), ("STORE", "127.0.0.1:4444:of the trial:")):
        monkeypatch.setenv(getattr(module, f"{name}_VARIABLE"), value)
    assert started({"local_strategy": "pipeline", "stages": 3}) == [("here", 3)]
