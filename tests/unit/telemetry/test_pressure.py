"""Pressure stall information as kernels tell it, or do not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.records.rows import Pressure
from paceline.telemetry.pressure import PressureReader

if TYPE_CHECKING:
    from pathlib import Path

BOTH = (
    "some avg10=1.00 avg60=0.50 avg300=0.10 total={}\n"
    "full avg10=0.00 avg60=0.00 avg300=0.00 total={}\n"
)


def test_waiting_is_told_in_seconds_by_resource(tmp_path: Path) -> None:
    (tmp_path / "pressure").mkdir()
    (tmp_path / "pressure" / "memory").write_text(BOTH.format(2_500_000, 1_000_000))
    (tmp_path / "pressure" / "io").write_text(BOTH.format(4, 0))
    assert PressureReader(tmp_path).read() == {
        "memory": Pressure(some_s=2.5, full_s=1.0),
        "io": Pressure(some_s=4e-6, full_s=0.0),
    }


def test_stalled_cpu_of_a_whole_system_means_nothing(tmp_path: Path) -> None:
    (tmp_path / "pressure").mkdir()
    (tmp_path / "pressure" / "cpu").write_text(BOTH.format(3_000_000, 0))
    assert PressureReader(tmp_path).read() == {"cpu": Pressure(some_s=3.0, full_s=None)}


def test_old_kernel_tells_only_some_of_the_cpu(tmp_path: Path) -> None:
    (tmp_path / "pressure").mkdir()
    (tmp_path / "pressure" / "cpu").write_text("some avg10=0 avg60=0 avg300=0 total=7\n")
    assert PressureReader(tmp_path).read() == {"cpu": Pressure(some_s=7e-6)}


def test_kernel_without_psi_says_nothing(tmp_path: Path) -> None:
    assert PressureReader(tmp_path).read() == {}
