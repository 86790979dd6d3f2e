"""Agreement of the workloads of segmentation and text detection with the usual libraries.

    python library_agreement.py --out results/raw/library_agreement.json

Needs torchvision, torchmetrics and shapely, which Paceline itself does not need. Each case has the
largest difference, relative to the largest value of the library:

- Models with weights of torchvision, which `weights` reads: scores of the classifiers, and the
  feature maps of DeepLab's encoders.
- The loss and the metrics of segmentation, without the pixels of `ignore_index`.
- Images and masks that are scaled and cropped.
- Rotated boxes of EAST: which cells they cover, the distances to their edges, and the box that the
  five maps of a cell give back.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import shapely
import torch
import torchmetrics
import torchvision
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as transforms

from common import documented_parser, write_results
from paceline.train.data.masks import ImagesWithMasks, class_of_value
from paceline.train.data.text_boxes import CELL, Rectangle, add_box, empty_target
from paceline.train.rank.evaluation import metric_sums
from paceline.train.workloads.build import build_model, make_task

Compared = tuple[Tensor, Tensor]  # Paceline's, the library's
CLASSES, IGNORED = 21, 255  # of VOC
LIMIT = 1e-5


def main() -> None:
    parser = documented_parser(__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSON file for all raw values")
    options = parser.parse_args()
    torch.manual_seed(1)
    rows = []
    for name, library, compare in cases():
        ours, theirs = (values.double() for values in compare())
        largest = float(theirs.abs().max())
        error = float((ours - theirs).abs().max()) / largest
        row = {"case": name, "library": library, "values": theirs.numel(), "error": error}
        rows.append({**row, "agrees": error < LIMIT})
        print(f"{name}: {error:.2g}")
    libraries = {"torchvision": torchvision, "torchmetrics": torchmetrics, "shapely": shapely}
    results = {
        "limit": LIMIT,
        "rows": rows,
        "libraries": {name: module.__version__ for name, module in libraries.items()},
    }
    write_results(options.out, "library_agreement", results)
    if not all(row["agrees"] for row in rows):
        raise SystemExit(1)


def cases() -> Iterator[tuple[str, str, Callable[[], Compared]]]:
    """Yield each case: its name, the library, and both values."""
    models = torchvision.models
    for workload, model, side in (
        ("simple-big", models.alexnet, 224),
        ("complex-small", models.vgg16, 224),
        ("resnet101", models.resnet101, 64),
    ):
        yield f"{workload}, scores", "torchvision", _classifier(workload, model, side)
    sizes = {"swin_t": (96, 6), "swin_s": (96, 18), "swin_b": (128, 18)}
    for name, (width, blocks) in sizes.items():
        for side in (224, 513, 90) if name == "swin_t" else (90,):
            encoder = {"backbone": "swin", "width": width, "middle_blocks": blocks}
            compare = _swin(encoder, getattr(models, name), side)
            yield f"deeplab, {name}, {side} pixels", "torchvision", compare
    for name, depth in (("resnet50", 50), ("resnet101", 101)):
        compare = _residual(depth, getattr(models, name))
        yield f"deeplab, {name} with dilation, 129 pixels", "torchvision", compare
    yield "deeplab, loss with ignore_index", "torch", _entropy
    yield "deeplab, mean IoU with ignore_index", "torchmetrics", _mean_iou
    yield "deeplab, Dice with ignore_index", "torchmetrics", _dice
    for size in (96, 513):
        yield f"masks of VOC, {size} pixels", "torchvision", _masks(size)
    yield "east, cells in rotated boxes", "OpenCV", lambda: _boxes(_cells)
    yield "east, distances to the edges", "OpenCV", lambda: _boxes(_distances)
    yield "east, IoU of restored boxes", "shapely", lambda: _boxes(_restored)


def _randomised(model: nn.Module) -> nn.Module:
    """Return a model in evaluation mode whose normalisations do something."""
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d | nn.LayerNorm):
            nn.init.normal_(layer.weight, 1, 0.1)
            nn.init.normal_(layer.bias, 0, 0.1)
        if isinstance(layer, nn.BatchNorm2d):
            assert layer.running_mean is not None
            assert layer.running_var is not None
            nn.init.normal_(layer.running_mean, 0, 0.1)
            nn.init.uniform_(layer.running_var, 0.5, 1.5)
    return model.eval()


def _with_weights_of(model: nn.Module, workload: str, side: int, **options: Any) -> nn.Module:
    """Return Paceline's model, which reads the weights of another one from a file."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "weights.safetensors")
        save_file({name: t.contiguous() for name, t in model.state_dict().items()}, file)
        given = {**options, "weights": str(file)}
        task = make_task(workload, image_size=side, classes=1000, options=given)
        return build_model(task).eval()


def _classifier(workload: str, make: Callable[[], nn.Module], side: int) -> Callable[[], Compared]:
    def compare() -> Compared:
        theirs = _randomised(make())
        ours = _with_weights_of(theirs, workload, side)
        images = torch.randn(2, 3, side, side)
        with torch.no_grad():
            return ours(images), theirs(images)

    return compare


_NEW = ["pyramid.*", "reduce.*", "decoder.*", "head.*", "fc.*"]


def _swin(
    encoder: dict[str, Any], make: Callable[[], nn.Module], side: int
) -> Callable[[], Compared]:
    def compare() -> Compared:
        theirs = _randomised(make())
        options = {**encoder, "new_parameters": _NEW}
        ours = _with_weights_of(theirs, "deeplab", side, **options)
        images = torch.randn(2, 3, side, side)
        own = images
        with torch.no_grad():
            for name in (*(f"features.{number}" for number in range(8)), "norm"):
                own = ours.get_submodule(name)(own)
            features = theirs.get_submodule("norm")(theirs.get_submodule("features")(images))
        return own, features.permute(0, 3, 1, 2)

    return compare


def _residual(depth: int, make: Callable[..., nn.Module]) -> Callable[[], Compared]:
    def compare() -> Compared:
        theirs = _randomised(make(replace_stride_with_dilation=[False, False, True]))
        ours = _with_weights_of(theirs, "deeplab", 129, depth=depth, new_parameters=_NEW)
        own = images = torch.randn(2, 3, 129, 129)
        names = ("conv1", "bn1", "relu", "maxpool", "layer1", "layer2", "layer3", "layer4")
        with torch.no_grad():
            for name in names:
                own = ours.get_submodule(name)(own)
                images = theirs.get_submodule(name)(images)
        return own, images

    return compare


def _segmentation() -> tuple[Any, Tensor, Tensor]:
    """Return the task, scores, and targets of which a fifth does not count."""
    task = make_task("deeplab", options={"classes": CLASSES, "ignore_index": IGNORED})
    scores = torch.randn(4, CLASSES, 65, 65)
    targets = torch.randint(0, CLASSES, (4, 65, 65))
    targets[torch.rand(4, 65, 65) < 0.2] = IGNORED
    return task, scores, targets


def _entropy() -> Compared:
    """Compare the loss of each sample; the Dice part is by its formula."""
    task, scores, targets = _segmentation()
    entropy = torch.stack(
        [
            cross_entropy(each[None], target[None], ignore_index=IGNORED)
            for each, target in zip(scores, targets, strict=True)
        ]
    )
    counted = (targets != IGNORED)[:, None]
    share = scores.softmax(1) * counted
    actual = torch.stack([targets == index for index in range(CLASSES)], 1) * counted
    common = 2 * (share * actual).sum((2, 3)) + 1
    dice = 1 - (common / (share.sum((2, 3)) + actual.sum((2, 3)) + 1)).mean(1)
    return task.loss(scores, targets), entropy + dice


def _metric(name: str, theirs: Callable[[Tensor, Tensor], Tensor]) -> Compared:
    task, scores, targets = _segmentation()
    parts, wholes = metric_sums(task, scores, targets)[name]
    return (parts.double() / wholes).mean(), theirs(scores.argmax(1), targets)


def _mean_iou() -> Compared:
    return _metric(
        "mean_iou",
        torchmetrics.JaccardIndex(
            task="multiclass", num_classes=CLASSES, ignore_index=IGNORED, average="macro"
        ),
    )


def _dice() -> Compared:
    return _metric(
        "dice",
        torchmetrics.F1Score(
            task="multiclass", num_classes=CLASSES, ignore_index=IGNORED, average="macro",
            multidim_average="global",
        ),
    )  # fmt: skip


def _masks(size: int) -> Callable[[], Compared]:
    """Compare masks with a palette, as VOC stores them, with the transforms of torchvision."""

    def compare() -> Compared:
        rng = np.random.default_rng(1)
        # torchvision rounds the halves of an odd margin to even numbers; here margins are even
        values = np.kron(rng.integers(0, CLASSES, (75, 125)), np.ones((5, 5), np.uint8))
        values[:, ::40] = IGNORED
        mask = Image.fromarray(values.astype(np.uint8)).convert("P")
        mask.putdata(values.astype(np.uint8).ravel().tolist())
        mask.putpalette(rng.integers(0, 256, 768, dtype=np.uint8).tobytes())
        with tempfile.TemporaryDirectory() as folder:
            for name in ("images", "masks"):
                Path(folder, name).mkdir()
            Image.new("RGB", mask.size).save(Path(folder, "images", "a.jpg"))
            mask.save(Path(folder, "masks", "a.png"))
            found = ImagesWithMasks(folder, size, class_of_value(CLASSES, IGNORED))[0][1]
            with Image.open(Path(folder, "masks", "a.png")) as read:
                scaled = transforms.resize(read, size, InterpolationMode.NEAREST)
        cropped = np.array(transforms.center_crop(scaled, [size, size]))
        return torch.from_numpy(found), torch.from_numpy(cropped)

    return compare


Checked = Callable[[Rectangle, np.ndarray[Any, Any]], tuple[list[float], list[float]]]


def _boxes(check: Checked) -> Compared:
    """Compare the maps of 50 boxes, the values of one box after those of the other."""
    rng = np.random.default_rng(1)
    ours: list[float] = []
    theirs: list[float] = []
    for _ in range(50):
        (x, y), (width, height) = rng.uniform(100, 156, 2), rng.uniform(20, 90, 2)
        angle = rng.uniform(-math.pi / 4, math.pi / 4)
        box = Rectangle(x, y, width, height, angle)
        target = empty_target(256, with_angle=True)
        add_box(target, box)
        own, other = check(box, target)
        ours += own
        theirs += other
    return torch.tensor(ours, dtype=torch.float64), torch.tensor(theirs, dtype=torch.float64)


def _corners(box: Rectangle) -> np.ndarray[Any, Any]:
    degrees = math.degrees(box.angle)
    return cv2.boxPoints(((box.x, box.y), (box.width, box.height), degrees)).astype(np.float32)


def _cells(box: Rectangle, target: np.ndarray[Any, Any]) -> tuple[list[float], list[float]]:
    corners = _corners(box)
    centres = (np.arange(target.shape[1]) + 0.5) * CELL
    inside = [
        [float(cv2.pointPolygonTest(corners, (float(x), float(y)), False) > 0) for x in centres]
        for y in centres
    ]
    return target[0].ravel().tolist(), np.ravel(inside).tolist()


def _distances(box: Rectangle, target: np.ndarray[Any, Any]) -> tuple[list[float], list[float]]:
    """Compare the smallest of the four distances with that to the outline."""
    corners = _corners(box)
    rows, columns = np.nonzero(target[0])
    found = [
        cv2.pointPolygonTest(corners, (float((x + 0.5) * CELL), float((y + 0.5) * CELL)), True)
        for y, x in zip(rows, columns, strict=True)
    ]
    smallest = target[1:5, rows, columns].min(0) * 256
    return smallest.tolist(), found


def _restored(box: Rectangle, target: np.ndarray[Any, Any]) -> tuple[list[float], list[float]]:
    """Return the IoU of the boxes that cells give back with the box; it is 1."""
    actual = shapely.Polygon(_corners(box))
    found = []
    for y, x in list(zip(*np.nonzero(target[0]), strict=True))[::40]:
        top, right, bottom, left = target[1:5, y, x] * 256
        angle = float(target[5, y, x])
        across, down = (right - left) / 2, (bottom - top) / 2
        centre = (
            (x + 0.5) * CELL + math.cos(angle) * across - math.sin(angle) * down,
            (y + 0.5) * CELL + math.sin(angle) * across + math.cos(angle) * down,
        )
        size = (float(left + right), float(top + bottom))
        restored = Rectangle(float(centre[0]), float(centre[1]), *size, angle)
        polygon = shapely.Polygon(_corners(restored))
        found.append(polygon.intersection(actual).area / polygon.union(actual).area)
    return found, [1.0] * len(found)


if __name__ == "__main__":
    main()
