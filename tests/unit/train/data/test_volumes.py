"""NIfTI volumes become slices with masks."""

from __future__ import annotations

import sys

import nibabel
import numpy as np
import pytest

from paceline.base.errors import DataError, EnvironmentLacks
from paceline.train.data.masks import SlicesWithMasks, class_of_value
from paceline.train.workloads.build import make_task

SHAPE = (40, 20, 3)  # columns, rows, slices


@pytest.fixture
def folder(tmp_path):
    """Two volumes: values are places along the first axis; the mask is its upper half."""
    places = np.broadcast_to(np.arange(40, dtype=np.int16)[:, None, None], SHAPE)
    for name in ("images", "masks"):
        (tmp_path / name).mkdir()
    for name in ("a", "b"):
        for part, values in (("images", 10 * places - 1000), ("masks", (places >= 20) * 2)):
            volume = nibabel.Nifti1Image(values.astype(np.int16), np.eye(4))
            volume.to_filename(tmp_path / part / f"{name}.nii.gz")
    return tmp_path


def test_slices_of_all_volumes_have_pixels_and_classes(folder):
    options = {"folder": str(folder), "classes": 3}
    items = make_task("deeplab", image_size=32, options=options).dataset()
    assert items is not None
    assert len(items) == 6
    for index in (0, 5, 2):
        pixels, classes = items[index]
        assert (pixels.shape, classes.shape) == ((32, 32, 3), (32, 32))
        assert (classes[:, :16] == 0).all()
        assert (classes[:, 16:] == 2).all()
        assert (np.diff(pixels[7, :, 1].astype(int)) >= 0).all()
        # the middle half of values from black to white
        assert pixels.min() == pytest.approx(255 / 4, abs=16)
        assert pixels.max() == pytest.approx(255 * 3 / 4, abs=16)


def test_values_that_are_no_classes_are_refused(folder):
    with pytest.raises(DataError, match=r"a\.nii\.gz, slice 1: expected values 0 to 1, got 2"):
        SlicesWithMasks(folder, 32, class_of_value(2))[1]


def test_volumes_that_do_not_fit_are_refused(folder):
    other = nibabel.Nifti1Image(np.zeros((4, 4, 4), np.int16), np.eye(4))
    other.to_filename(folder / "masks" / "a.nii.gz")
    with pytest.raises(DataError, match=r"expected the shape of its volume, \(40, 20, 3\), got"):
        SlicesWithMasks(folder, 32, class_of_value(3))
    (folder / "masks" / "a.nii.gz").unlink()
    with pytest.raises(DataError, match=r"masks/a\.nii\.gz: expected a mask for each volume"):
        SlicesWithMasks(folder, 32, class_of_value(3))
    nibabel.Nifti1Image(np.zeros((4, 4, 4, 2), np.int16), np.eye(4)).to_filename(
        folder / "images" / "a.nii.gz"
    )
    other.to_filename(folder / "masks" / "a.nii.gz")
    with pytest.raises(DataError, match="expected a volume with three axes"):
        SlicesWithMasks(folder, 32, class_of_value(3))


@pytest.mark.parametrize("name", ["a.nii", "a.nii.gz"])
def test_damaged_volume_is_refused(folder, name):
    (folder / "images" / "a.nii.gz").unlink()
    (folder / "images" / name).write_bytes(b"no volume" * 99)
    (folder / "masks" / name).write_bytes(b"")
    with pytest.raises(DataError, match="expected a NIfTI volume"):
        SlicesWithMasks(folder, 32, class_of_value(3))


def test_volume_that_is_cut_off_is_refused(folder):
    file = folder / "images" / "a.nii.gz"
    file.write_bytes(file.read_bytes()[:-100])
    items = SlicesWithMasks(folder, 32, class_of_value(3))
    with pytest.raises(DataError, match=r"a\.nii\.gz: damaged volume"):
        items[0]


def test_extra_is_named_where_it_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "nibabel", None)
    for name in ("images", "masks"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.nii").touch()
    with pytest.raises(
        EnvironmentLacks, match="expected the package nibabel, not installed; `pip install"
    ):
        SlicesWithMasks(tmp_path, 32, class_of_value(3))
