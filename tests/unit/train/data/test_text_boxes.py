"""Text files of ICDAR become the targets of a network that finds text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from paceline.base.errors import DataError
from paceline.train.data.text_boxes import IGNORED, ImagesWithText, Rectangle

SIDE = 64


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One image of 256x128 pixels: scaled by 1/2, and 32 pixels less at both sides."""
    for name in ("images", "boxes"):
        (tmp_path / name).mkdir()
    Image.new("RGB", (256, 128)).save(tmp_path / "images" / "a.png")
    return tmp_path


def target(folder: Path, lines: str, *, with_angle: bool = True) -> np.ndarray:
    (folder / "boxes" / "gt_a.txt").write_text(lines, encoding="utf-8-sig")
    return ImagesWithText(folder, SIDE, with_angle=with_angle)[0][1]


@pytest.mark.parametrize(
    "line",
    [
        "80,32,176,32,176,64,80,64,Text, and more",
        "176,32,176,64,80,64,80,32,Text",
        '80, 32, 176, 64, "Text"',
        '80 32 176 64 "Text"',
        "80,32,176,64",
    ],
)
def test_box_has_its_cells_and_distances(folder: Path, line: str) -> None:
    found = target(folder, f"\n{line}\n")
    covered = np.zeros((16, 16))
    covered[4:8, 2:14] = 1  # from (8, 16) to (56, 32) in pixels of the sample
    np.testing.assert_array_equal(found[0], covered)
    np.testing.assert_allclose(found[1:, 4, 2] * SIDE, [2, 46, 14, 2, 0], atol=1e-4)
    upright = target(folder, line, with_angle=False)
    np.testing.assert_allclose(upright, found[:5], atol=1e-5)


@pytest.mark.parametrize("degrees", [-40.0, -10.0, 30.0])
def test_rotated_box_has_its_angle_and_sides(folder: Path, degrees: float) -> None:
    angle = np.radians(degrees)
    along = np.array([np.cos(angle), np.sin(angle)])
    across = np.array([-np.sin(angle), np.cos(angle)])
    centre = np.array([128, 64])
    corners = [
        centre + a * 40 * along + b * 20 * across for a, b in ((-1, -1), (1, -1), (1, 1), (-1, 1))
    ]
    found = target(folder, ",".join(f"{value:.3f}" for corner in corners for value in corner))
    inside = found[0] > 0
    np.testing.assert_allclose(found[5][inside], angle, atol=1e-3)
    np.testing.assert_allclose((found[1] + found[3])[inside] * SIDE, 20, atol=0.01)
    np.testing.assert_allclose((found[2] + found[4])[inside] * SIDE, 40, atol=0.01)
    assert inside.sum() == pytest.approx(40 * 20 / 16, abs=8)


def test_unreadable_text_does_not_count(folder: Path) -> None:
    found = target(folder, "80,32,176,32,176,64,80,64,###")
    assert np.unique(found[0]).tolist() == [IGNORED, 0]


def test_distances_are_along_the_sides_of_a_rotated_box() -> None:
    box = Rectangle(10, 10, 8, 4, angle=np.pi / 2)  # its width points down
    edges = box.edges(np.array([11.0]), np.array([12.0]))
    np.testing.assert_allclose(edges[:, 0], [1, 2, 3, 6], atol=1e-9)


@pytest.mark.parametrize("line", ["Text", "1,2,3", "1,2,3,nan", "1,2,x,4,5,6,7,8"])
def test_line_without_a_box_is_named(folder: Path, line: str) -> None:
    with pytest.raises(DataError, match=r"gt_a\.txt, line 2: expected four corners, or left, top"):
        target(folder, f"\n{line}")


def test_missing_files_are_named(folder: Path) -> None:
    with pytest.raises(DataError, match=r"expected boxes/gt_a\.txt for a\.png, found none"):
        ImagesWithText(folder, SIDE, with_angle=True)
    (folder / "images" / "a.png").unlink()
    with pytest.raises(DataError, match="found no image"):
        ImagesWithText(folder, SIDE, with_angle=True)
