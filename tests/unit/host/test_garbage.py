from __future__ import annotations

import gc

import pytest

from paceline.host.memory import permanent_objects


def test_collector_ignores_what_was_made_meanwhile_and_works_again():
    with permanent_objects():
        assert not gc.isenabled()
        made = []
    assert gc.isenabled()
    assert not any(each is made for each in gc.get_objects())


def test_collector_works_again_after_an_error():
    with pytest.raises(ImportError), permanent_objects():
        raise ImportError
    assert gc.isenabled()
