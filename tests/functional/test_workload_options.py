"""Real runs with the options of segmentation and text detection, and with cold data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
from PIL import Image
from safetensors.torch import save_file
from tests.functional.cli_runs import cli_in, trial
from tests.support.specs import spec_text

from paceline.measure.records.layout import RunFiles
from paceline.train.workloads.build import build_model, make_task

pytestmark = [pytest.mark.functional, pytest.mark.timeout(700)]

SIDE, IMAGES = 65, 6
SMALL = {"depth": 26, "width": 4}
TRIALS = (
    'launcher = "local"; local_strategy = "processes"; ranks_per_node = 2; oversubscribe = true'
)
WAITING = trial("local", "gloo", bucket_wait_ms=2.0, bucket_mb=0.05)


def write_pictures(folder: Path, seed: int) -> Path:
    """Images whose masks have 0, 255 for the object, and 128 for what does not count."""
    rng = np.random.default_rng(seed)
    for name in ("images", "masks"):
        (folder / name).mkdir(parents=True)
    for number in range(IMAGES):
        mask = np.zeros((70, 80), np.uint8)
        top, left = rng.integers(0, 30, 2)
        mask[top : top + 30, left : left + 40] = 255
        mask[top + 30 : top + 33, left : left + 40] = 128
        pixels = rng.integers(0, 100, (70, 80, 3)) + 100 * (mask == 255)[..., None]
        Image.fromarray(pixels.astype(np.uint8)).save(folder / "images" / f"{number}.png")
        Image.fromarray(mask).save(folder / "masks" / f"{number}.png")
    return folder


def write_volumes(folder: Path) -> Path:
    rng = np.random.default_rng(3)
    for name in ("images", "masks"):
        (folder / name).mkdir(parents=True)
    mask = np.zeros((64, 64, 8), np.int16)
    mask[20:50, 10:40, :] = 1
    values = (rng.normal(0, 50, mask.shape) + 400 * mask).astype(np.int16)
    nibabel.Nifti1Image(values, np.eye(4)).to_filename(folder / "images" / "a.nii.gz")
    nibabel.Nifti1Image(mask, np.eye(4)).to_filename(folder / "masks" / "a.nii.gz")
    return folder


def write_text(folder: Path) -> Path:
    """Rotated boxes as ICDAR 2015 writes them."""
    rng = np.random.default_rng(4)
    for name in ("images", "boxes"):
        (folder / name).mkdir(parents=True)
    for number in range(IMAGES):
        pixels = rng.integers(0, 255, (96, 120, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "images" / f"img_{number}.jpg")
        lines = "30,30,90,40,87,58,27,48,Text\n20,70,40,70,40,80,20,80,###\n"
        (folder / "boxes" / f"gt_img_{number}.txt").write_text(lines, "utf-8-sig")
    return folder


def write_weights(file: Path) -> Path:
    """Weights of the encoder with the names of torchvision; a classifier is in the file, too."""
    options = {"backbone": "resnet", **SMALL}
    state = build_model(make_task("deeplab", image_size=64, options=options)).state_dict()
    encoder = ("conv1", "bn1", "layer1", "layer2", "layer3", "layer4")
    kept = {name: t for name, t in state.items() if name.startswith(encoder)}
    save_file({**kept, "fc.weight": state["conv1.weight"].flatten(1).clone()}, file)
    return file


def workload(name: str, options: dict[str, Any], **values: Any) -> str:
    """Return an entry of [[workloads]]."""
    lines = [f"{key} = {json.dumps(value)}" for key, value in {"name": name, **values}.items()]
    table = "\n".join(f"{key} = {toml(value)}" for key, value in options.items())
    return "[[workloads]]\n" + "\n".join(lines) + f"\n[workloads.options]\n{table}\n"


def toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f'"{key}" = {toml(each)}' for key, each in value.items()) + " }"
    return json.dumps(value)


@pytest.fixture(scope="module")
def run(tmp_path_factory, cache, forks):
    folder = tmp_path_factory.mktemp("options")
    trained, others = (write_pictures(folder / name, n) for n, name in enumerate(("a", "b")))
    masks = {"classes": 2, "mask_values": {"0": 0, "255": 1, "128": 255}, "ignore_index": 255}
    moved = {"flip_vertically": True, "rotate_degrees": 30.0, "optimizer": "adam"}
    swin = {"backbone": "swin", "width": 8, "middle_blocks": 2, "stochastic_depth": 0.1}
    read = {"weights": str(write_weights(folder / "w.safetensors"))}
    new = {"new_parameters": ["pyramid.*", "reduce.*", "decoder.*", "fc.*"]}
    entries = [
        workload(
            "deeplab", {"folder": str(trained), **masks, **moved, **swin}, image_size=SIDE,
            learning_rate=0.01, held_out_data=str(others),
        ),
        workload(
            "slices", {"folder": str(write_volumes(folder / "c")), "classes": 2, **SMALL, **read,
            **new}, task="paceline.train.workloads.deeplab:DeepLab", image_size=64,
        ),
        workload(
            "east", {"folder": str(write_text(folder / "d")), "angle": True, "width": 8},
            image_size=64,
        ),
    ]  # fmt: skip
    head, _, tail = spec_text(
        TRIALS,
        tables="[training]; global_batch = 4; epochs = 2; warmup_steps = 0; "
        "[telemetry]; enabled = false",
        repeats=1,
    ).partition("[[workloads]]")
    spec = head + "".join(entries) + tail[tail.index("[[trials]]") :] + WAITING
    (folder / "options.toml").write_text(spec, "utf-8")
    paceline = cli_in(cache, folder, forks)
    finished = paceline.main("run", "options.toml", "--out", "run")
    assert finished.returncode == 0, finished.stderr
    return paceline, folder / "run"


def rows_of(run):
    paceline, folder = run
    return json.loads(paceline.main("compare", folder, "--json").stdout)


def test_every_strategy_trains_with_the_options_as_one_process(run):
    rows = rows_of(run)["rows"]
    assert len(rows) == 3 * 3
    assert {row["configuration"]: row["equivalent"] for row in rows} == {
        row["configuration"]: True for row in rows
    }


def test_models_are_evaluated_on_the_other_data_set(run):
    metrics = {row["workload"]: row["metrics"] for row in rows_of(run)["rows"]}
    assert metrics["deeplab"].keys() == {"loss", "mean_iou", "dice"}
    assert all(0 < metrics["deeplab"][name] <= 1 for name in ("mean_iou", "dice"))


def test_gradients_that_are_ready_after_a_wait_are_sent_together(run):
    _, folder = run
    results = [
        json.loads(files.result.read_text())["communication"]
        for name, files in RunFiles(folder).trials()
        if ".w2" in name
    ]
    assert len(results) == 3
    for found in results:
        assert found["bucket_wait_ms"] == 2
        assert sum(found["bucket_bytes"]) == found["uncompressed_bytes_per_step"]


COLD = spec_text(
    'launcher = "local"; local_strategy = "processes"; ranks_per_node = 2; oversubscribe = true',
    tables="[training]; image_size = 32; epochs = 1; warmup_steps = 0; batch_per_replica = 8; "
    "[telemetry]; enabled = false",
    workload='name = "tiny"; samples = 48; reading = "cold"',
    repeats=2,
)


def test_cold_data_are_read_within_the_measured_time(cache, forks, tmp_path):
    (tmp_path / "cold.toml").write_text(COLD, "utf-8")
    paceline = cli_in(cache, tmp_path, forks)
    finished = paceline.main("run", "cold.toml", "--out", "run")
    assert finished.returncode == 0, finished.stderr
    compared = rows_of((paceline, tmp_path / "run"))
    (processes,) = [row for row in compared["rows"] if row["local_strategy"] == "processes"]
    assert processes["equivalent"] is True
    assert processes["step_phases_s"]["data_wait"] > 0
    # all of the time counts, so a start that both have makes the ratio nearer to 1
    assert processes["wall_speedup"]["estimate"] > 0
    assert processes["wall_s"] > 3 * processes["step_s"]["estimate"]
    (growth,) = compared["weak_scaling"]
    assert [(each["replicas"], each["global_batch"]) for each in growth["points"]] == [
        (1, 8), (2, 16),
    ]  # fmt: skip
