"""The formats of `paceline export`, by name."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol

from paceline.errors import EnvironmentLacks, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from paceline.export.run_data import RunData


class Exporter(Protocol):
    """Writes a run, or one trial of it, into the folder `out`; returns what it has written."""

    def __call__(self, run: RunData, out: Path, trial: str | None) -> Sequence[Path]: ...


# Imported on use: a format may need a library that is not installed.
_EXPORTERS = {
    "csv": "paceline.export.tables:write_csv",
    "parquet": "paceline.export.tables:write_parquet",
    "mlflow": "paceline.export.mlflow:write_mlflow",
    "tensorboard": "paceline.export.tensorboard:write_tensorboard",
    "perfetto": "paceline.export.trace:write_perfetto",
    "openmetrics": "paceline.export.openmetrics:write_run",
    "onnx": "paceline.export.onnx:write_onnx",
}
FORMATS = tuple(_EXPORTERS)


def export(
    run: RunData, to: str, out: Path | None = None, trial: str | None = None
) -> Sequence[Path]:
    """Write the run in the format `to`; return the files or folders.

    out: a folder; default RUN_DIR/export/FORMAT. trial: only the trial with this id.
    Raises UsageError for an unknown format or trial, or if `out` cannot be written;
    EnvironmentLacks if the format's library is not installed; DataError if a file is damaged.
    """
    if to not in _EXPORTERS:
        raise UsageError(f"export: expected a format among {', '.join(FORMATS)}, got {to!r}")
    module, _, function = _EXPORTERS[to].partition(":")
    exporter: Exporter = getattr(import_module(module), function)
    folder = run.files.export / to if out is None else out
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"{folder}: expected a folder that can be written, got: {error.strerror or error}; "
            "choose another with --out"
        ) from error
    return exporter(run, folder, trial)


def require(extra: str, *modules: str) -> None:
    """Raise EnvironmentLacks with the command to install unless all `modules` are installed."""
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        raise EnvironmentLacks(
            f"export to {extra}: expected the packages {', '.join(modules)}, not installed: "
            f"{', '.join(missing)}; install them with `pip install 'paceline[{extra}]'`"
        )
