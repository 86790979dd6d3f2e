"""Export of trained models to ONNX, checked against torch with ONNX Runtime."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from paceline.analysis.trial.reading import TrialRecord
from paceline.base.errors import DataError, UsageError
from paceline.plan.spec.extensions import WORKLOADS
from paceline.show.export.run_data import RunData, require
from paceline.train.training.task import Task
from paceline.train.workloads.build import on_meta_device, task_of

_BATCHES = (1, 3)  # sizes with which the model is checked
# What `torch.testing.assert_close` allows for float32 is for one operation; a network sums many.
_RELATIVE, _ABSOLUTE = 1e-3, 1e-5
_SEED = 0


def write_onnx(run: RunData, out: Path, trial: str | None) -> list[Path]:
    """Write `ID.onnx` for each trial whose final weights were kept.

    The model takes "inputs" (a batch of what `Task.to_input` returns) and returns "outputs". Those
    of a built-in workload are "images" (float32: batch, 3, height, width; normalised as for
    training) and "logits" (batch, classes).
    Raises EnvironmentLacks without the libraries; UsageError for scripts, and for a task's model
    that torch cannot export; DataError if no weights were kept, or if ONNX Runtime computes
    something else than torch.
    """
    require("onnx", "onnx", "onnxscript", "onnxruntime")
    records = [r for r in run.chosen(trial) if r.trial.training.script is None]
    if not records:
        raise UsageError(
            f"{run.files.root}: expected a trial of a task, {trial or 'all trials'} ran a script. "
            "Call torch.onnx.export there; with `keep_tensors = true` the trained weights are in "
            "tensors/weights_final.safetensors of the trial."
        )
    kept = [record for record in records if record.files.weights.exists()]
    if not kept:
        raise DataError(_nothing_kept(run, trial))
    return [_write(record, out) for record in kept]


def _nothing_kept(run: RunData, trial: str | None) -> str:
    others = [r.trial.id for r in run.trials if r.files.weights.exists()]
    of_others = f" Weights were kept of: {', '.join(others)}." if others else ""
    return (
        f"{run.files.root}: expected the final weights of {trial or 'a trial'}, they were not "
        "kept. Paceline deletes them after the comparison with the baseline; set `keep_tensors = "
        f"true` in the spec and run it again.{of_others}"
    )


def _write(record: TrialRecord, out: Path) -> Path:
    task, model = _trained_model(record)
    training = record.trial.training
    named = training.entry_name in WORKLOADS
    of_images = named and not WORKLOADS.get(training.entry_name).own_samples
    names = ("images", "logits") if of_images else ("inputs", "outputs")
    path = out / f"{record.trial.id}.onnx"
    # the file appears only if it is right, and no link in its place is followed
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=out) as folder:
        temporary = Path(folder, path.name)
        _export(model, _inputs(task, 2), temporary, names)
        for batch in _BATCHES:
            _check(record.trial.id, temporary, model, _inputs(task, batch))
        return temporary.replace(path)


def _export(model: nn.Module, inputs: Tensor, path: Path, names: tuple[str, str]) -> None:
    try:
        torch.onnx.export(
            model,
            (inputs,),
            path,
            input_names=[names[0]],
            output_names=[names[1]],
            dynamic_shapes=({0: torch.export.Dim("batch")},),
            dynamo=True,
            external_data=False,  # one file; protobuf allows 2 GB
            verbose=False,
        )
    except torch.onnx.OnnxExporterError as error:
        raise UsageError(
            f"torch.onnx cannot export {type(model).__name__}: {str(error).splitlines()[0]}; "
            "write its forward without Python code that depends on values"
        ) from error


def _trained_model(record: TrialRecord) -> tuple[Task, nn.Module]:
    """Return the task, and its model with the trial's final weights in evaluation mode."""
    training, result = record.trial.training, record.result
    try:
        weights = load_file(record.files.weights)
        classes = None if result is None else result.classes
        if classes is None:  # the last layer has an output for each
            last = list(on_meta_device(_task(record, 1)).state_dict())[-1]
            classes = len(weights[last])
        task = _task(record, classes)
        model = on_meta_device(task)
        model.load_state_dict(weights, assign=True)
    except (SafetensorError, KeyError, RuntimeError) as error:
        raise DataError(
            f"{record.files.weights}: expected the weights of {training.model}: {error}"
        ) from error
    lost = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    if lost:
        raise UsageError(
            f"{training.model}: buffer {lost[0]} is not part of the weights, so its values are not "
            "known; register it with persistent=True"
        )
    return task, model.eval()


def _task(record: TrialRecord, classes: int) -> Task:
    task = task_of(record.trial.training, classes=classes, folder=record.files.root)
    result = record.result
    if result is None or not result.input_shape or result.input_dtype is None:
        return task
    settings = dataclasses.replace(
        task.settings, input_shape=tuple(result.input_shape), input_dtype=result.input_dtype
    )
    return type(task)(settings)


def _inputs(task: Task, batch: int) -> Tensor:
    """Return random inputs like the example; of integers, zeros and ones."""
    generator = torch.Generator().manual_seed(_SEED)
    example = task.example_input()
    shape = (batch, *example.shape[1:])
    if example.is_floating_point():
        return torch.randn(shape, generator=generator)
    return torch.randint(2, shape, generator=generator, dtype=example.dtype)


def _check(trial: str, path: Path, model: nn.Module, inputs: Tensor) -> None:
    import onnxruntime  # noqa: PLC0415  (the extra)

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (name,) = (value.name for value in session.get_inputs())
    found: NDArray[np.float32] = session.run(None, {name: inputs.numpy()})[0]
    with torch.no_grad():
        expected: NDArray[np.float32] = model(inputs).numpy()
    if not np.allclose(found, expected, rtol=_RELATIVE, atol=_ABSOLUTE):
        difference = float(np.max(np.abs(found - expected)))
        raise DataError(
            f"{trial}: expected the ONNX model to compute what torch computes, but its outputs "
            f"differ by up to {difference:.2g}; nothing was written. Please report it."
        )
