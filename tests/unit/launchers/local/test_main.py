"""`python -m paceline.launchers.local` by hand: one rank here, or one child process per rank."""

import pytest

from paceline.job.rank_status import RankEnd
from paceline.launchers.local import __main__ as module


@pytest.fixture
def started(monkeypatch, tmp_path):
    """What is started by the words, as ("children" | "here", ranks)."""

    def start(words):
        given = f"--workload tiny --data {tmp_path} --out {tmp_path / 'run'} --oversubscribe"
        seen = []

        def run_ranks(job):
            seen.append(("children", job.trial.placement.ranks))
            return RankEnd(rank=0)

        def run_rank(_job, context, _watched, **_rest):
            seen.append(("here", context.world_size))
            return RankEnd(rank=0)

        monkeypatch.setattr(
            "sys.argv", ["paceline.launchers.local", *given.split(), *words.split()]
        )
        monkeypatch.setattr(module, "run_ranks", run_ranks)
        monkeypatch.setattr(module, "run_rank", run_rank)
        assert module.main() == 0
        return seen

    return start


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", ("here", 1)),
        ("--local-strategy threads --replicas 2", ("here", 1)),
        ("--ranks 2", ("children", 2)),
        ("--local-strategy processes --replicas 2", ("children", 2)),
        ("--local-strategy pipeline --stages 2", ("children", 2)),
        ("--local-strategy hybrid --stages 2 --replicas 2", ("children", 4)),
    ],
)
def test_ranks_by_hand_are_those_of_the_strategy(words, expected, started):
    assert started(words) == [expected]


def test_child_has_the_world_of_its_strategy(started, monkeypatch):
    for name, value in (("RANK", "1"), ("STORE", "127.0.0.1:4444:")):
        monkeypatch.setenv(getattr(module, f"{name}_VARIABLE"), value)
    assert started("--local-strategy pipeline --stages 3") == [("here", 3)]
