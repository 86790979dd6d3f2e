"""What is said of communication, on the page and in the terminal."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from tests.support.terminal import shown
from tests.unit.analysis import fabricate
from tests.unit.analysis import operations as made

from paceline.analysis.compare.run import compare_run
from paceline.analysis.trial.communication import TrialCommunication, trial_communication
from paceline.measure.records.layout import RunFiles
from paceline.show.report.document import render
from paceline.show.report.profile import communication_section, overview, profile_view, size_words


@pytest.fixture
def run(tmp_path: Path) -> RunFiles:
    """A sequential trial, one over mpi with operations, one over gloo without, a hybrid."""
    late = dataclasses.replace(fabricate.MPI, lead_s=0.05, clock_offset_s=2.0)
    ways = [fabricate.SEQUENTIAL, late, fabricate.TORCHRUN, fabricate.HYBRID]
    made_run: RunFiles = fabricate.make_run(tmp_path, ways)
    for name, files in made_run.trials():
        if ".mpi.mpi." in name:
            made.two_buckets(files, sent_bytes=20_000_000, sent_messages=2)
    return made_run


@pytest.fixture
def profiles(run: RunFiles) -> dict[str, TrialCommunication]:
    comparison = compare_run(run)
    found = {}
    for trials in comparison.trials.values():
        profile = trial_communication(trials[0].record)
        if profile is not None:
            found[profile.transport] = profile
    return found


def test_page_names_the_straggler_beside_the_tables(run: RunFiles) -> None:
    page = render(compare_run(run))
    assert '<h2 id="communication">' in page
    section = page[page.index('id="communication"') : page.index('id="resources"')]
    assert "Straggler: rank 1 on node1 is last in 100% of the steps" in section
    assert "delays each step by 50 ms" in section
    assert "allreduce" in section
    assert "No operation was recorded" in section  # the other two
    assert "Straggler of stage" not in section


def test_page_without_peers_has_no_such_section(tmp_path: Path) -> None:
    files = fabricate.make_run(tmp_path, [fabricate.SEQUENTIAL, fabricate.INTRAOP])
    page = render(compare_run(files))
    assert 'id="communication"' not in page
    assert "#communication" not in page


def test_figure_has_a_bar_for_each_rank(run: RunFiles) -> None:
    section = communication_section(compare_run(run))
    (workload,) = section.parts
    assert len(workload.parts) == 3
    figure = workload.charts[0].json
    for name in ("exposed waiting", "exposed transfer", "overlapped communication", "r3"):
        assert name in figure


@pytest.mark.parametrize("transport", ["mpi", "gloo", "shared"])
def test_terminal_fits_80_columns(profiles: dict[str, TrialCommunication], transport: str) -> None:
    text = shown(profile_view(profiles[transport]))
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    assert "rank" in text


def test_terminal_shows_ranks_operations_and_checks(profiles) -> None:
    text = shown(profile_view(profiles["mpi"]), 120)
    lines = {line.split()[0]: line.split() for line in text.splitlines() if line.strip()}
    # rank, host, step, compute, waiting, transfer, overlapped, between
    assert lines["0"][:6] == ["0", "node0", "345", "285", "50.0", "10.0"]
    assert lines["1"][:4] == ["1", "node1", "345", "335"]
    assert "Straggler: rank 1" in text
    assert "an error of 0.020 ms: a shorter wait counts as transfer" in text
    # ten steps, two ranks, two all-reduces; two ranks' ring sends half there and half back
    assert "ring: all ranks sent 80 messages, 800,000,000 bytes" in text
    assert "needs 440,000,000 bytes, in at least 80 messages" in text.replace("\n", " ")
    assert text.count(": yes, ") == 2


def test_terminal_says_where_nothing_was_recorded(profiles) -> None:
    text = shown(profile_view(profiles["gloo"]))
    assert "No operation was recorded" in text
    assert "GB/s" not in text


def test_overview_has_a_line_for_each_trial(profiles: dict[str, TrialCommunication]) -> None:
    text = shown(overview(list(profiles.values())))
    assert max(map(len, text.splitlines())) <= 80
    begins = [line.split(".")[0] for line in text.splitlines()[2:] if line[0] != " "]
    assert begins == ["mpi", "torchrun", "local"]
    assert "rank 1: 50" in text


@pytest.mark.parametrize(
    ("least", "most", "words"),
    [
        (0, 10**5, "< 0.1"),
        (10**5, 10**6, "0.1\N{EN DASH}1"),
        (10**6, 10**7, "1\N{EN DASH}10"),
        (10**8, None, "> 100"),
    ],
)
def test_sizes_are_said_in_words(profiles, least, most, words) -> None:
    each = dataclasses.replace(profiles["mpi"].bins[0], least_bytes=least, most_bytes=most)
    assert size_words(each) == words
