"""Operations in flight."""

from __future__ import annotations

from datetime import timedelta

import pytest

from paceline.errors import TimedOut
from paceline.transports.work import PendingWork


@pytest.mark.parametrize(
    ("asked", "named"), [(timedelta(0), r"0\.05 s"), (timedelta(seconds=0.02), r"0\.02 s")]
)
def test_message_names_the_limit_that_was_given(asked: timedelta, named: str) -> None:
    """A waiter gives the limiter some more time, which is nobody's limit."""
    with pytest.raises(TimedOut, match=rf"within {named} \(limits"):
        PendingWork("barrier", 0, 0.05, []).wait(asked)
