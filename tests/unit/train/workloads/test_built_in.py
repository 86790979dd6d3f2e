"""The built-in workloads, at a small size: equivalent training, published sizes, metrics, data."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from PIL import Image
from tests.unit.train.strategies.own_training import TRIALS, train, train_by_hand, trial_of

from paceline.base.errors import DataError, UsageError
from paceline.plan.spec.extensions import WORKLOADS
from paceline.plan.trials.sample_order import SampleRandom
from paceline.train.data.masks import ImagesWithMasks, class_of_value
from paceline.train.rank.evaluation import metric_sums
from paceline.train.training.passes import summed_loss
from paceline.train.training.strategy import TrainBatch
from paceline.train.workloads.build import build_model, make_task, on_meta_device
from paceline.train.workloads.deeplab import moved
from paceline.train.workloads.east import Boxes
from paceline.train.workloads.gpt import GPT
from paceline.train.workloads.resnet import residual_layers

BATCHES = [3]  # samples of the step: two replicas get unequal shares
GPT_OPTIONS = {"vocabulary": 11, "length": 8, "width": 16, "heads": 2, "blocks": 2}


class SmallGPT(GPT):
    """The rank that reads the data knows the shape of an input; these tests have no reader."""

    def example_input(self):
        return torch.zeros(1, GPT_OPTIONS["length"], dtype=torch.int64)


# task, options, side of an image
SMALL = {
    "cifar-cnn": ("paceline.train.workloads.convolutional:CifarCnn", {}, 32),
    "resnet101": ("paceline.train.workloads.resnet:ResNet", {"depth": 26, "width": 4}, 64),
    "deeplab": ("paceline.train.workloads.deeplab:DeepLab", {"depth": 26, "width": 8}, 64),
    # the pixels of a class do not count, so shares count differently many; sides are odd
    "ignoring": (
        "paceline.train.workloads.deeplab:DeepLab",
        {"depth": 26, "width": 8, "ignore_index": 3},
        65,
    ),
    "xception": (
        "paceline.train.workloads.deeplab:DeepLab",
        {"backbone": "xception", "width": 8, "middle_blocks": 1},
        64,
    ),
    "swin": (
        "paceline.train.workloads.deeplab:DeepLab",
        {"backbone": "swin", "width": 8, "middle_blocks": 2},
        64,
    ),
    "east": ("paceline.train.workloads.east:East", {"width": 8}, 64),
    "rotated": ("paceline.train.workloads.east:East", {"width": 8, "angle": True}, 64),
    "gpt-small": (f"{__name__}:SmallGPT", GPT_OPTIONS, 32),
}  # fmt: skip


def small_trial(name, strategy, **training):
    task, options, side = SMALL[name]
    values = {"task": task, "options": options, "image_size": side, "items": 16, **training}
    layout = TRIALS.get(strategy, {"strategy": strategy})
    trial = trial_of(**layout, **{"learning_rate": 0.001, **values})
    if trial.option("micro_batches") is None or "cnn" in name or "gpt" in name:
        return trial
    undivided = trial.strategy_options.model_copy(update={"micro_batches": 1})
    return trial.model_copy(update={"strategy_options": undivided})


def samples_of(trial, step, samples):
    """The global batch of a step: of the task's synthetic data, or random images."""
    settings = {"samples": 64, "image_size": trial.training.image_size, "classes": 3}
    task = make_task(trial.training.task, options=trial.training.options, **settings)
    items, ids = task.dataset(), np.arange(samples) + 4 * step
    if items is None:
        rng = np.random.default_rng(step)
        side = trial.training.image_size
        inputs = rng.integers(0, 256, (samples, side, side, 3), dtype=np.uint8)
        targets = rng.integers(0, 3, samples)
    else:
        inputs, targets = (
            np.stack(values) for values in zip(*(items[i] for i in ids), strict=True)
        )
        targets = targets.astype(np.int64) if targets.dtype.kind in "iu" else targets
    return TrainBatch(
        step=step, epoch=0, inputs=task.to_input(inputs), targets=torch.from_numpy(targets),
        sample_ids=ids, global_samples=samples,
    )  # fmt: skip


@pytest.fixture(scope="module")
def by_hand():
    """Gradients and new weights of a step with torch alone, for each workload once."""

    @cache
    def trained(name):
        return train_by_hand(small_trial(name, "sequential"), BATCHES, samples_of)

    return trained


@pytest.mark.parametrize("strategy", ["sequential", "intraop", "processes-2", "pipeline-2"])
@pytest.mark.parametrize("name", SMALL)
def test_every_strategy_trains_it_as_torch_alone(name, strategy, by_hand):
    gradients, weights = by_hand(name)
    ranks = train(small_trial(name, strategy), BATCHES, samples_of)
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    for key, gradient in gradients.items():
        error = float((ranks[0][0][key] - gradient).abs().max())
        assert error < 1e-3 * float(gradient.abs().max()) + 1e-6 * largest, key
    for _, found in ranks:
        assert list(found) == list(weights)
        for key, tensor in weights.items():
            torch.testing.assert_close(found[key], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", SMALL)
def test_loss_of_a_batch_is_the_sum_over_its_parts(name):
    trial = small_trial(name, "sequential")
    batch = samples_of(trial, 0, 4)
    values = {"image_size": trial.training.image_size, "classes": 3}
    task = make_task(trial.training.task, options=trial.training.options, **values)
    model = build_model(task).eval()
    whole, parts = (
        sum(
            summed_loss(task, model(batch.inputs[part]), batch.targets[part])
            for part in (slice(0, k), slice(k, 4))
            if part.stop > part.start
        )
        for k in (4, 1)
    )
    torch.testing.assert_close(whole, parts, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("name", "options", "parameters"),
    [
        # torchvision's listing, and Radford et al. without the biases of keys, queries and values
        ("resnet101", {}, 44_549_160),
        ("resnet101", {"depth": 50}, 25_557_032),
        (
            "gpt-small",
            {"vocabulary": 50257, "length": 1024, "width": 768, "heads": 12, "blocks": 12},
            124_439_808 - 12 * 3 * 768,
        ),
    ],
)
def test_models_have_the_published_number_of_parameters(name, options, parameters):
    model = on_meta_device(make_task(name, classes=1000, options=options))
    assert sum(p.numel() for p in model.parameters()) == parameters


@pytest.mark.parametrize("backbone", ["resnet", "xception", "swin"])
@pytest.mark.parametrize("side", [96, 75, 513])
def test_scores_of_deeplab_have_the_size_of_the_image(backbone, side):
    task = make_task("deeplab", image_size=side, options={"backbone": backbone})
    model = on_meta_device(task).eval()
    assert model(torch.zeros(2, 3, side, side, device="meta")).shape == (2, 4, side, side)


@pytest.mark.parametrize("side", [64, 65])
def test_dilation_keeps_the_values_of_pretrained_weights(side):
    plain, atrous = (
        torch.nn.Sequential(*residual_layers(26, 4, atrous=a).values()) for a in (0, 1)
    )
    for norm in plain.modules():
        if isinstance(norm, torch.nn.BatchNorm2d):
            torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    atrous.load_state_dict(plain.state_dict())
    images = torch.randn(2, 3, side, side)
    with torch.no_grad():
        coarse, fine = plain.eval()(images), atrous.eval()(images)
    assert fine.shape[-1] > coarse.shape[-1]
    torch.testing.assert_close(fine[..., ::2, ::2], coarse, rtol=1e-4, atol=1e-5)


def test_fewer_classes_than_synthetic_masks_have_are_refused():
    with pytest.raises(UsageError, match="classes: synthetic masks have 4, got 3"):
        make_task("deeplab", options={"classes": 3}).dataset()


def test_side_that_cannot_be_halved_is_refused():
    with pytest.raises(UsageError, match="needs a multiple of 32, got 72"):
        on_meta_device(make_task("east", image_size=72))


def test_metrics_of_segmentation_are_those_by_hand():
    task = make_task("deeplab", options={"classes": 3})
    predicted = torch.tensor([[[0, 0], [1, 1]], [[0, 1], [1, 1]]])
    targets = torch.tensor([[[0, 1], [1, 1]], [[0, 0], [1, 1]]])
    outputs = torch.nn.functional.one_hot(predicted, 3).permute(0, 3, 1, 2) * 10.0
    found = metric_sums(task, outputs, targets)
    # class 0: 2 of 4 pixels agree; class 1: 4 of 6; class 2 is nowhere and counts nothing
    total, count = found["mean_iou"]
    assert (total.tolist(), count.tolist()) == ([2, 4, 0], [4, 6, 0])
    total, count = found["dice"]
    assert (total.tolist(), count.tolist()) == ([4, 8, 0], [6, 10, 0])


def test_loss_of_segmentation_is_cross_entropy_plus_dice():
    task = make_task("deeplab", options={"classes": 2})
    scores = torch.zeros(1, 2, 2, 2)  # each class has 1/2 everywhere
    targets = torch.tensor([[[0, 0], [0, 1]]])
    dice = [(2 * 1.5 + 1) / (2 + 3 + 1), (2 * 0.5 + 1) / (2 + 1 + 1)]
    expected = np.log(2) + 1 - np.mean(dice)
    assert task.loss(scores, targets).tolist() == pytest.approx([expected])


def test_ignored_pixels_change_neither_loss_nor_metrics():
    task = make_task("deeplab", options={"classes": 2, "ignore_index": 255})
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(2, 2, 1, 6, generator=generator)
    targets = torch.tensor([[[0, 1, 1, 0, 255, 255]], [[255, 255, 255, 255, 255, 255]]])
    counted = make_task("deeplab", options={"classes": 2})
    expected = counted.loss(scores[:1, :, :, :4], targets[:1, :, :4])
    torch.testing.assert_close(task.loss(scores, targets), torch.cat([expected, torch.zeros(1)]))
    found = metric_sums(task, scores, targets)
    alone = metric_sums(counted, scores[:1, :, :, :4], targets[:1, :, :4])
    for metric in ("mean_iou", "dice"):
        assert [part.tolist() for part in found[metric]] == [p.tolist() for p in alone[metric]]


def test_ignored_pixels_get_no_gradient():
    task = make_task("deeplab", options={"classes": 2, "ignore_index": 255})
    scores = torch.zeros(1, 2, 1, 4, requires_grad=True)
    task.loss(scores, torch.tensor([[[0, 1, 255, 255]]])).sum().backward()
    assert scores.grad is not None
    assert (scores.grad[..., 2:] == 0).all()
    assert (scores.grad[..., :2] != 0).all()


@pytest.mark.parametrize("options", [{}, {"flip": True, "degrees": 30.0}])
def test_transforms_move_image_and_mask_alike_and_depend_on_the_sample(options):
    pixels = np.arange(32 * 32, dtype=np.int64).reshape(32, 32)
    image = np.stack([pixels, pixels, pixels], axis=-1)
    seen = set()
    for sample in range(6):
        random = SampleRandom(1, 0, sample)
        found = moved(pixels, random, **options)
        np.testing.assert_array_equal(moved(image, random, **options)[..., 0], found)
        again = moved(pixels, SampleRandom(1, 0, sample), **options)
        np.testing.assert_array_equal(again, found)
        seen.add(found.tobytes())
    assert len(seen) == 6
    task = make_task("deeplab", options={"augment": False})
    assert task.augment_target(pixels, SampleRandom(1, 0, 0)) is pixels


def test_half_of_the_images_are_turned_upside_down_and_angles_have_their_limit():
    rows, columns = np.mgrid[:65, :65]
    turned, angles = [], []
    for sample in range(200):
        random = SampleRandom(1, 0, sample)
        flipped = moved(rows, random, flip=True)[:, 32].astype(int)
        turned.append(flipped[40] < flipped[24])
        y, x = (moved(grid, random, degrees=30.0).astype(int) for grid in (rows, columns))
        # the line through the centre, within the image in most samples
        rise, run = y[32, 40] - y[32, 24], abs(x[32, 40] - x[32, 24])
        angles.append(np.degrees(np.arctan2(rise, run)))
    assert 80 < sum(turned) < 120
    assert max(map(abs, angles)) < 36  # of the nearest pixels
    assert min(angles) < -20
    assert max(angles) > 20


def test_synthetic_boxes_have_the_distances_to_their_edges():
    image, target = Boxes(4, 64, seed=1)[2]
    assert (image.shape, target.shape) == ((64, 64, 3), (5, 16, 16))
    inside = target[0] > 0
    assert 0 < inside.mean() < 0.5
    assert (target[1:, inside] > 0).all()
    assert (target[1:, ~inside] == 0).all()
    y, x = np.argwhere(inside)[0]
    top, right, bottom, left = target[1:, y, x] * 64
    # the box contains this cell's centre, and its neighbours as far as the edges are
    assert inside[int((y * 4 + 2 + bottom) // 4) - 1, x]
    assert 64 / 3 - 1 <= left + right <= 32
    assert 8 <= top + bottom <= 64 / 3


def test_rotated_boxes_are_drawn_where_their_targets_say():
    image, target = Boxes(4, 128, seed=1, with_angle=True)[2]
    upright, plain = Boxes(4, 128, seed=1)[2]
    assert (target.shape, plain.shape) == ((6, 32, 32), (5, 32, 32))
    inside = target[0] > 0
    angles = np.unique(target[5][inside])
    assert len(angles) == 2  # boxes
    assert (np.abs(angles) <= np.radians(20)).all()
    assert (target[1:5, inside] > 0).all()
    assert not np.array_equal(image, upright)
    # half of the stripes are darker than the noise around
    cells = image.mean(2).reshape(32, 4, 32, 4).mean((1, 3))
    assert cells[inside].mean() < cells[~inside].mean() - 15


def test_loss_and_error_of_angles_are_those_by_hand():
    task = make_task("east", image_size=32, options={"angle": True})
    targets = torch.zeros(1, 6, 1, 2)
    targets[:, 0, 0, 0], targets[:, 1:5], targets[:, 5] = 1, 0.5, 0.25
    outputs = torch.zeros_like(targets)  # distances of 1/2, an angle of 0
    upright = targets * torch.tensor([1, 1, 1, 1, 1, 0]).view(1, 6, 1, 1)
    turned = task.loss(outputs, targets) - task.loss(outputs, upright)
    assert turned.tolist() == pytest.approx([10 * (1 - np.cos(0.25))], rel=1e-4)
    error, cells = metric_sums(task, outputs, targets)["angle_error"]
    assert error.tolist() == pytest.approx([np.degrees(0.25)])
    assert cells.tolist() == [1]


def test_cells_whose_text_is_not_known_do_not_count():
    task = make_task("east", image_size=32)
    generator = torch.Generator().manual_seed(1)
    outputs = torch.randn(1, 5, 2, 4, generator=generator)
    targets = torch.full((1, 5, 2, 4), 0.3)
    targets[:, 0] = torch.tensor([[1, 1, 0, -1], [0, 0, 0, -1]])
    other = outputs.clone()
    other[..., 3] = 7
    torch.testing.assert_close(task.loss(other, targets), task.loss(outputs, targets))
    first, second = (metric_sums(task, o, targets) for o in (outputs, other))
    assert [p.tolist() for p in first["text_iou"]] == [p.tolist() for p in second["text_iou"]]


@pytest.fixture
def folder(tmp_path):
    """Two images of 40x20 pixels with masks: one PNG with a palette, one grey."""
    rng = np.random.default_rng(1)
    for name in ("images", "masks"):
        (tmp_path / name).mkdir()
    for name in ("a", "b"):
        pixels = rng.integers(0, 256, (20, 40, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "images" / f"{name}.png")
        classes = np.zeros((20, 40), np.uint8)
        classes[:, 20:] = 2
        mask = Image.fromarray(classes)
        if name == "a":
            mask = mask.convert("P")
            mask.putpalette([0, 0, 0, 9, 9, 9, 200, 0, 0])
        mask.save(tmp_path / "masks" / f"{name}.png")
    return tmp_path


def test_images_and_masks_of_a_folder_are_cropped_alike(folder):
    task = make_task("deeplab", image_size=32, options={"folder": str(folder)})
    items = task.dataset()
    assert items is not None
    assert len(items) == 2
    for image, mask in (items[0], items[1]):
        assert (image.shape, mask.shape) == ((32, 32, 3), (32, 32))
        assert (mask[:, :16] == 0).all()
        assert (mask[:, 16:] == 2).all()


def test_image_without_mask_or_with_another_size_is_refused(folder):
    Image.new("L", (20, 20)).save(folder / "masks" / "b.png")
    with pytest.raises(DataError, match=r"b\.png: expected the size of its image, 40x20"):
        ImagesWithMasks(folder, 32, class_of_value(3))[1]
    Image.new("RGB", (40, 20)).save(folder / "masks" / "b.png")
    with pytest.raises(DataError, match="one channel or a palette, got mode RGB"):
        ImagesWithMasks(folder, 32, class_of_value(3))[1]
    with pytest.raises(DataError, match=r"a\.png: expected values 0 to 1, got 2; set classes"):
        ImagesWithMasks(folder, 32, class_of_value(2))[0]
    (folder / "masks" / "b.png").unlink()
    with pytest.raises(DataError, match=r"1 are missing, first that of b\.png"):
        ImagesWithMasks(folder, 32, class_of_value(3))


def test_values_of_masks_become_the_classes_that_the_options_state(folder):
    values = np.zeros((20, 40), np.uint8)
    values[:, 20:], values[:, 25:] = 255, 7
    Image.fromarray(values).save(folder / "masks" / "b.png")

    def classes_of(**options):
        options = {"folder": str(folder), "classes": 2, **options}
        items = make_task("deeplab", image_size=32, options=options).dataset()
        assert items is not None
        return np.unique(items[1][1]).tolist()

    assert classes_of(mask_values={"0": 0, "7": 1, "255": 1}) == [0, 1]
    assert classes_of(mask_values={"0": 0, "7": 1}, ignore_index=255) == [0, 1, 255]
    with pytest.raises(DataError, match=r"b\.png: expected values 0, 7, got 255; set classes, ign"):
        classes_of(mask_values={"0": 0, "7": 1})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mask_values": {"0": 0}}, "mask_values needs the option folder"),
        (
            {"folder": "f", "mask_values": {"255": 4}},
            "mask_values: expected classes from 0 to 3, or ignore_index, got 4",
        ),
        ({"ignore_index": 256}, "ignore_index: .* 255"),
        ({"augment": False, "rotate_degrees": 30.0}, "rotate_degrees need augment = true"),
    ],
)
def test_options_of_masks_that_do_not_fit_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        make_task("deeplab", options=options)


def test_token_file_becomes_sequences_that_share_a_token(tmp_path):
    np.save(tmp_path / "t.npy", np.arange(12, dtype=np.uint16))
    options = {**GPT_OPTIONS, "vocabulary": 12, "length": 4, "tokens": str(tmp_path / "t.npy")}
    task = make_task("gpt-small", options=options)
    items = task.dataset()
    assert items is not None
    assert [items[i][0].tolist() for i in range(len(items))] == [[0, 1, 2, 3, 4], [4, 5, 6, 7, 8]]
    assert task.to_input(np.stack([items[1][0]])).tolist() == [[4, 5, 6, 7]]
    with pytest.raises(DataError, match="expected tokens from 0 to 10, got 0 to 11"):
        make_task("gpt-small", options={**options, "vocabulary": 11}).dataset()


def test_descriptors_name_the_fields_of_their_tasks():
    for workload in WORKLOADS.all():
        task = make_task(workload.name, samples=8, image_size=workload.image_size)
        assert workload.fields == (task.input_field, task.target_field)
        assert workload.own_samples == (task.dataset() is not None)
