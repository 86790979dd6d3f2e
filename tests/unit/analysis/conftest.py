"""Gives the tests the fabricator of run directories, which tests of the report share."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from types import ModuleType

_NAME = "paceline_tests_fabricate"


def _load() -> ModuleType:
    if _NAME not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            _NAME, Path(__file__).parents[1] / "analysis" / "fabricate.py"
        )
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[_NAME] = module
        spec.loader.exec_module(module)
    return sys.modules[_NAME]


@pytest.fixture(scope="session")
def fabricate() -> ModuleType:
    """tests/unit/analysis/fabricate.py"""
    return _load()
