from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.train.training.task import Task, TaskSettings, to_input, torch_memory_format


@pytest.mark.parametrize("memory_format", ["contiguous", "channels_last"])
def test_pixels_are_normalised_in_the_memory_format_asked(memory_format):
    images = np.random.default_rng(1).integers(0, 256, (2, 5, 4, 3), dtype=np.uint8)
    got = to_input(images, memory_format)
    mean, std = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    want = ((images / 255 - mean) / std).transpose(0, 3, 1, 2)
    assert got.dtype == torch.float32
    assert got.is_contiguous(memory_format=torch_memory_format(memory_format))
    np.testing.assert_allclose(got.numpy(), want, atol=1e-6)


def test_photos_given_are_left_as_they_are():
    images = np.full((1, 2, 2, 3), 200, dtype=np.uint8)
    to_input(images, "channels_last")
    assert (images == 200).all()


def test_empty_share_keeps_its_shape():
    empty = np.zeros((0, 8, 8, 3), dtype=np.uint8)
    assert to_input(empty, "contiguous").shape == (0, 3, 8, 8)


class Halved(Task):
    def to_input(self, samples):
        return super().to_input(samples) / 2


@pytest.mark.parametrize("kind", [Task, Halved])
def test_memory_prepared_for_a_batch_is_filled_with_the_input_of_the_task(kind):
    task = kind(TaskSettings(memory_format="channels_last"))
    images = np.random.default_rng(1).integers(0, 256, (2, 5, 4, 3), dtype=np.uint8)
    out = task.empty_input(images)
    task.fill_input(images, out)
    assert torch.equal(out, task.to_input(images))
    assert kind is Halved or out.is_contiguous(memory_format=torch.channels_last)
