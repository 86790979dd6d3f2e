"""Statuses that the ranks wrote; a file may be missing or incomplete."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline import errors
from paceline.errors import DataError, ExitCode, PacelineError
from paceline.records.files import read_json
from paceline.records.rows import RankStatus

if TYPE_CHECKING:
    from paceline.records.layout import TrialFiles


def read_statuses(files: TrialFiles) -> list[RankStatus]:
    """Return the status of every rank that has written one, by rank."""
    statuses = []
    for _, rank_files in files.ranks():
        try:
            statuses.append(RankStatus(**read_json(rank_files.status)))
        except (DataError, TypeError):
            continue  # it does not exist yet, or is of another version
    return statuses


def error_text(error: BaseException) -> str:
    """Return an error as a status contains it: `EnvironmentLacks: expected …`."""
    return f"{type(error).__name__}: {error}"


def exit_code_of(text: str | None) -> ExitCode:
    """Return the exit code of an `error_text`; RANK_FAILED if the error is not Paceline's."""
    kind = getattr(errors, (text or "").partition(":")[0], None)
    if isinstance(kind, type) and issubclass(kind, PacelineError):
        return kind.exit_code if kind.exit_code != ExitCode.INTERNAL else ExitCode.RANK_FAILED
    return ExitCode.RANK_FAILED
