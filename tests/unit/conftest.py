from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.unit.analysis import fabricate as fabricator

if TYPE_CHECKING:
    from types import ModuleType


@pytest.fixture(scope="session")
def fabricate() -> ModuleType:
    """Makes run directories of which every number is known (tests/unit/analysis/fabricate.py)."""
    return fabricator
