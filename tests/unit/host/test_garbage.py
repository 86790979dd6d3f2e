from __future__ import annotations

import gc

import pytest

from paceline.host.garbage import permanent_objects


def test_collector_ignores_what_was_made_meanwhile_and_works_again():
    try:
        with permanent_objects():
            assert not gc.isenabled()
            cycle = []
            cycle.append(cycle)
        assert gc.isenabled()
        assert gc.get_freeze_count() > 0
        assert not any(each is cycle for each in gc.get_objects())
    finally:
        gc.unfreeze()
    assert any(each is cycle for each in gc.get_objects())


def test_collector_works_again_after_an_error():
    try:
        with pytest.raises(ImportError), permanent_objects():
            raise ImportError
        assert gc.isenabled()
    finally:
        gc.unfreeze()
