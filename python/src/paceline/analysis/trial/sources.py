"""The user's code that the trials of a run ran, as their ranks recorded it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from paceline.analysis.trial.reading import TrialRecord
from paceline.measure.records.sources import read_sources

_DIGITS = 12  # of a checksum: enough to tell versions apart


def with_sources(manifest: Mapping[str, Any], records: Sequence[TrialRecord]) -> dict[str, Any]:
    """Return the manifest of a run with `sources`, the checksums of the files that its ranks read.

    There is none without files of the user's own, and for runs of older versions.
    """
    found: defaultdict[str, set[str]] = defaultdict(set)
    for record in records:
        for name, versions in read_sources(record.files).items():
            found[name] |= {sha256[:_DIGITS] for sha256 in versions}
    sources = {name: ", ".join(sorted(versions)) for name, versions in sorted(found.items())}
    return {**manifest, **({"sources": sources} if sources else {})}


def source_flags(records: Sequence[TrialRecord]) -> Iterator[str]:
    """Describe files that have changed between the trials, or that ranks have read differently."""
    trials: defaultdict[str, dict[str, set[str]]] = defaultdict(dict)  # checksums by path and trial
    names: dict[str, str] = {}
    for record in records:
        for name, versions in read_sources(record.files).items():
            if len(versions) > 1:
                yield f"{record.trial.id}: its ranks ran different versions of {name}"
            for sha256, path in versions.items():
                names[path] = name
                trials[path].setdefault(record.trial.id, set()).add(sha256)
    for path, versions_of in trials.items():
        own = [record for record in records if record.trial.id in versions_of]
        last = versions_of[max(own, key=_launched).trial.id]
        old = [record for record in own if not versions_of[record.trial.id] & last]
        if old:
            yield (
                f"{names[path]} has changed during the run; measured with an older version: "
                f"{', '.join(_rows(old, records))}"
            )


def _launched(record: TrialRecord) -> float:
    return 0.0 if record.outcome is None else record.outcome.launched_unix_s


def _rows(old: Sequence[TrialRecord], records: Sequence[TrialRecord]) -> Iterator[str]:
    """Yield the configurations of trials, with the number of their repeats if it is not all."""
    for name in dict.fromkeys(record.trial.configuration for record in old):
        count, of = (
            sum(each.trial.configuration == name for each in group) for group in (old, records)
        )
        yield name if count == of else f"{name} ({count} of {of} repeats)"
