"""Keeps Petastorm's known deprecation warnings off the user's screen."""

from __future__ import annotations

import warnings


def quiet_petastorm() -> None:
    """Ignore FutureWarnings that Petastorm 0.12.1 causes in pyarrow 14, and only those.

    It uses pyarrow's legacy data set classes throughout; the versions are pinned because of that.
    """
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"petastorm\.")
