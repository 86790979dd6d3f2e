"""Options that make a script equal to one process, as trials and as words."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from paceline.plan.trials.trial import Alterations
from paceline.runner.trials.verify_script import Equalising

SHARE = ("--batch-size", 32)


@pytest.mark.parametrize(("ranks", "value"), [(1, 32), (2, 16), (4, 8)])
def test_a_rank_gets_its_share_after_the_other_arguments(ranks, value):
    trial = SimpleNamespace(arguments=("--a",), placement=SimpleNamespace(ranks=ranks))
    found = Equalising(share=SHARE).arguments(trial)
    assert found == ("--a", f"--batch-size={value}")
    assert Equalising().arguments(trial) == ("--a",)


def test_words_are_those_that_the_user_types():
    altered = Alterations(seed=0, no_dropout=True)
    words = Equalising(altered=altered, share=SHARE).words
    assert words == "--seed 0 --no-dropout --share --batch-size=32"
    assert Equalising().words == ""
