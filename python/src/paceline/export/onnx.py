"""Export of trained models to ONNX, checked against torch with ONNX Runtime."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from paceline.errors import DataError, UsageError
from paceline.export.libraries import require
from paceline.workloads.build import on_meta_device, task_of

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray
    from torch import Tensor, nn

    from paceline.analysis.reading import TrialRecord
    from paceline.export.run_data import RunData
    from paceline.plan.trial import Training

_BATCHES = (1, 3)  # sizes with which the model is checked
# What `torch.testing.assert_close` allows for float32 is for one operation; a network sums many.
_RELATIVE, _ABSOLUTE = 1e-3, 1e-5
_SEED = 0


def write_onnx(run: RunData, out: Path, trial: str | None) -> list[Path]:
    """Write `ID.onnx` for each trial whose final weights were kept.

    The model takes "images" (float32: batch, 3, height, width; normalised as for training) and
    returns "logits" (batch, classes).
    Raises EnvironmentLacks without the libraries; UsageError for scripts and tasks of the user;
    DataError if no weights were kept, or if ONNX Runtime computes something else than torch.
    """
    require("onnx", "onnx", "onnxscript", "onnxruntime")
    records = [r for r in run.chosen(trial) if _is_built_in(r.trial.training)]
    if not records:
        raise UsageError(
            f"{run.files.root}: expected a trial of a built-in workload, {trial or 'all trials'} "
            "ran code of yours. Call torch.onnx.export there; with `keep_tensors = true` the "
            "trained weights are in tensors/weights_final.safetensors of the trial."
        )
    kept = [record for record in records if record.files.weights.exists()]
    if not kept:
        raise DataError(_nothing_kept(run, trial))
    return [_write(record, out) for record in kept]


def _is_built_in(training: Training) -> bool:
    """Return whether inputs and outputs of the model are known: images and logits."""
    return training.script is None and not training.task


def _nothing_kept(run: RunData, trial: str | None) -> str:
    others = [r.trial.id for r in run.trials if r.files.weights.exists()]
    of_others = f" Weights were kept of: {', '.join(others)}." if others else ""
    return (
        f"{run.files.root}: expected the final weights of {trial or 'a trial'}, they were not "
        "kept. Paceline deletes them after the comparison with the baseline; set `keep_tensors = "
        f"true` in the spec and run it again.{of_others}"
    )


def _write(record: TrialRecord, out: Path) -> Path:
    model = _trained_model(record)
    size = record.trial.training.image_size
    path = out / f"{record.trial.id}.onnx"
    temporary = out / f".{record.trial.id}.onnx"  # the file appears only if it is right
    try:
        torch.onnx.export(
            model,
            (_images(2, size),),
            temporary,
            input_names=["images"],
            output_names=["logits"],
            dynamic_shapes=({0: torch.export.Dim("batch")},),
            dynamo=True,
            external_data=False,  # one file; protobuf allows 2 GB
            verbose=False,
        )
        for batch in _BATCHES:
            _check(record.trial.id, temporary, model, _images(batch, size))
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def _trained_model(record: TrialRecord) -> nn.Module:
    """Return the model with the trial's final weights, in evaluation mode."""
    training = record.trial.training
    folder = record.files.root
    initial = on_meta_device(task_of(training, classes=1, folder=folder))
    last = list(initial.state_dict())[-1]
    try:
        weights = load_file(record.files.weights)
        classes = len(weights[last])  # the last layer has an output for each
        model = on_meta_device(task_of(training, classes=classes, folder=folder))
        model.load_state_dict(weights, assign=True)
    except (SafetensorError, KeyError, RuntimeError) as error:
        raise DataError(
            f"{record.files.weights}: expected the weights of {training.model}: {error}"
        ) from error
    return model.eval()


def _images(batch: int, size: int) -> Tensor:
    generator = torch.Generator().manual_seed(_SEED)
    return torch.randn(batch, 3, size, size, generator=generator)


def _check(trial: str, path: Path, model: nn.Module, images: Tensor) -> None:
    import onnxruntime  # noqa: PLC0415  (the extra)

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    found: NDArray[np.float32] = session.run(["logits"], {"images": images.numpy()})[0]
    with torch.no_grad():
        expected: NDArray[np.float32] = model(images).numpy()
    if not np.allclose(found, expected, rtol=_RELATIVE, atol=_ABSOLUTE):
        difference = float(np.max(np.abs(found - expected)))
        raise DataError(
            f"{trial}: expected the ONNX model to compute what torch computes, but its outputs "
            f"differ by up to {difference:.2g}; nothing was written. Please report it."
        )
