"""Transport `mpi`. Importing this module initialises MPI."""

from __future__ import annotations

from typing import cast

from paceline.base.errors import PacelineError
from paceline.collectives.mpi.group_core import BACKEND
from paceline.collectives.mpi.process_group import Options, describe_library
from paceline.collectives.torch_internals import Store
from paceline.measure.records.communication import TransportResult
from paceline.plan.trials.trial import RankContext, Trial
from paceline.train.transports.descriptors import MpiOptions
from paceline.train.transports.network import DefaultGroupTransport


class MpiTransport(DefaultGroupTransport):
    """MPI collectives on a progress thread of this rank."""

    backend = BACKEND

    def open(self, context: RankContext, trial: Trial, store: Store) -> None:
        options = Options(algorithm=trial.options_as(MpiOptions).algorithm)
        self.open_group(context, trial, store, pg_options=options)

    def explain(self, error: Exception) -> PacelineError | None:  # noqa: ARG002
        """Return the group's error. DDP raises a copy of it without its type."""
        failure: PacelineError | None = None if self._group is None else self._group.failure
        return failure

    def describe(self) -> TransportResult:
        how = self._group.describe() if self._group is not None else {}
        # a transport may tell more, so mypy asks for the other keys
        return cast("TransportResult", {**describe_library(), **how})
