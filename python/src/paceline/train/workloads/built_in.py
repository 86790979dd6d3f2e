"""Options of all built-in workloads: initial weights from a file."""

from __future__ import annotations

from paceline.train.training.task import Task, TaskOptions, TaskSettings


class BuiltInOptions(TaskOptions):
    """weights: file with initial weights by the model's names. new_parameters: shell patterns of
    names that only the model or only the file may have."""

    weights: str | None = None
    new_parameters: tuple[str, ...] = ()


class BuiltInTask(Task):
    """A task whose initial weights an option can name."""

    Options = BuiltInOptions

    def __init__(self, settings: TaskSettings) -> None:
        super().__init__(settings)
        self.new_parameters = self.options.new_parameters

    def pretrained(self) -> str | None:
        return self.options.weights  # type: ignore[no-any-return]  # of the model of options
