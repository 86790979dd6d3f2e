"""A run's last values for node_exporter: what a scrape would have told of it."""

from __future__ import annotations

import dataclasses
import shutil
import stat
import subprocess
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.unit.telemetry.full_tick import EXPECTED, FACTS, HOST, RUN, WATCH, key

from paceline.telemetry.textfile import final_text, textfile_path, write_textfile


def test_final_text_tells_all_of_the_run_and_nothing_of_the_host() -> None:
    found = {
        key(sample.name, sample.labels): sample.value
        for family in text_string_to_metric_families(final_text(WATCH, HOST))
        for sample in family.samples
        if not sample.name.endswith("_info")
    }
    assert found == {at: value for at, value in EXPECTED.items() if f"run={RUN}" in at}


def test_final_text_escapes_what_a_name_may_hold() -> None:
    facts = {**FACTS, "trial": 'a "b"\\\nc'}
    text = final_text(dataclasses.replace(WATCH, facts=facts), HOST)
    families = {family.name: family for family in text_string_to_metric_families(text)}
    (sample,) = families["paceline_run_info"].samples
    assert sample.labels["trial"] == 'a "b"\\\nc'


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (float("nan"), "NaN"),
        (float("inf"), "+Inf"),
        (float("-inf"), "-Inf"),
        (1e-07, "1e-07"),
    ],
)
def test_numbers_are_written_as_the_format_has_them(loss: float, text: str) -> None:
    (progress,) = WATCH.training()
    further = dataclasses.replace(progress, loss=loss)
    watch = dataclasses.replace(WATCH, training=lambda: (further,))
    at = f'paceline_training_loss{{host="{HOST}",run="{RUN}",rank="0"}}'
    assert f"\n{at} {text}\n" in final_text(watch, HOST)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_finds_no_fault() -> None:
    check = subprocess.run(
        ["promtool", "check", "metrics"],
        input=final_text(WATCH, HOST),
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (check.returncode, check.stdout, check.stderr) == (0, "", "")


def test_textfile_of_a_run_is_replaced_by_its_next_trial(tmp_path: Path) -> None:
    write_textfile(tmp_path, HOST, WATCH)
    later = dataclasses.replace(WATCH, launched_unix_s=1700000100.0)
    write_textfile(tmp_path, HOST, later)
    assert [path.name for path in tmp_path.iterdir()] == [f"paceline-{HOST}-{RUN}.prom"]
    assert textfile_path(tmp_path, HOST, RUN).read_text() == final_text(later, HOST)


def test_textfile_can_be_read_by_node_exporter(tmp_path: Path) -> None:
    write_textfile(tmp_path, HOST, WATCH)
    mode = textfile_path(tmp_path, HOST, RUN).stat().st_mode
    assert stat.S_IMODE(mode) == 0o644
