"""Two hosts for tests of several: network namespaces of this machine (paceline.lab)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.cluster.lab.labs import checked_lab

from paceline.lab import LabSettings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.lab import Lab

# Each offers two ranks; they share this machine's cores.
TWO_HOSTS = LabSettings(hosts=2, slots=2)


@pytest.fixture
def fresh_lab() -> Iterator[Lab]:
    """For a test that split points links or kills what runs there."""
    with checked_lab(TWO_HOSTS) as lab:
        yield lab


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """For tests that leave it as they found it."""
    with checked_lab(TWO_HOSTS) as made:
        yield made
