"""The worker's side of the parameter server: requests to all servers, and their answers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from paceline.records.rows import UpdateRow
from paceline.strategies.parameter_server.messages import Request

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.strategies.parameter_server.messages import Messages
    from paceline.strategies.parameter_server.server import Server


class ServerClient:
    """Sends the requests of one worker. The server of its own rank gets them without messages."""

    def __init__(self, rank: int, places: list[slice], server: Server, messages: Messages) -> None:
        """places: of the shards in the flat weights, by server. server: that of this rank.
        messages: of the worker alone."""
        self.places = places
        self.has_left = False
        self._rank, self._server, self.messages = rank, server, messages
        self._others = [other for other in range(len(places)) if other != rank]
        self._versions = [0] * len(places)  # of the last fetch, by server
        self._pushed = self._pushed_before_fetch = 0
        self._rows: list[UpdateRow] = []

    def send(self, request: Request, gradient: Tensor | None = None) -> None:
        """Send a request to every server, with the numbers of this worker filled in.

        gradient: of the whole model, flat, if it pushes; it must not change until all is sent.
        """
        for server in [*self._others, self._rank]:
            own = replace(request, pushed=self._pushed, version=self._versions[server])
            part = None if gradient is None else gradient[self.places[server]]
            if server == self._rank:
                self._server.request(own, part)
            else:
                self.messages.request(server, own, part)
        if request.pushes:
            self._rows.append(
                UpdateRow(
                    event="pushed",
                    worker=self._rank,
                    sequence=self._pushed,
                    step=request.clock - 1,
                    shards=len(self.places),
                )
            )
            self._pushed += 1

    def receive(self, into: Tensor, needed_clock: int, *, trains: bool = True) -> list[int]:
        """Get the fetched weights of all shards. trains: whether the worker continues with them.

        Return how many updates of other workers each shard has got since the last fetch. The own
        server comes first: there, the limit of a wait for slow workers knows their progress.
        """
        versions = list(self._versions)
        own = into[self.places[self._rank]]
        versions[self._rank] = self._server.fetch(needed_clock, own)
        for server in self._others:
            versions[server] = self.messages.receive_weights(server, into[self.places[server]])
        own_updates = self._pushed - self._pushed_before_fetch
        pairs = zip(versions, self._versions, strict=True)
        missed = [now - before - own_updates for now, before in pairs]
        if trains:
            self._versions, self._pushed_before_fetch = versions, self._pushed
        return missed

    def leave(self, clock: int) -> None:
        """Notify the servers that no request will follow."""
        for server in self._others:
            leaving = Request(leaves=True, clock=clock, pushed=self._pushed)
            self.messages.request(server, leaving, None)
        self.messages.finish()
        self.has_left = True

    def continue_after(self, pushed: int) -> None:
        """Number the next update `pushed`; the servers begin again with version 0."""
        self._pushed = self._pushed_before_fetch = pushed

    def take_rows(self) -> list[UpdateRow]:
        """Return the rows of the pushes since the last call."""
        rows, self._rows = self._rows, []
        return rows
