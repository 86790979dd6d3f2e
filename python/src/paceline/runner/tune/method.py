"""The rounds of a search, as data: what `paceline tune local` and `paceline tune comm` define.

All combinations of settings would be hundreds of trials. So each round changes one kind of setting,
on top of the fastest of the previous rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from paceline.base.errors import EnvironmentLacks, UsageError
from paceline.plan.spec import Experiment, TrialRequest, WorkloadRequest
from paceline.plan.trials.trial import Trial
from paceline.runner.tune.findings import Findings
from paceline.runner.tune.search import Bracket, FinalBracket
from paceline.runner.tune.spaces import (
    LeftOut,
    SearchContext,
    SearchTarget,
    Space,
    reason_of,
    space_of,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchPlan:
    """The trials that a search would measure first."""

    context: SearchContext
    baselines: Mapping[str, Trial]  # by workload
    spaces: tuple[Space, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Searched:
    """A target with its default, or the reason why it is not searched."""

    target: SearchTarget
    request: TrialRequest
    not_searched: str | None = None


Choices = Callable[[Searched, Trial | None, SearchContext], Sequence[TrialRequest]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchMethod:
    """A method of search: its targets, its rounds, and the meaning of its winners.

    rounds: by the kind of setting; each returns what to try for a target on top of the fastest
    trial so far, which is None in the first round of a method that compares targets.
    compares_targets: targets of a workload are alternatives. All are measured, and the fastest is
    the result. present: returns a request with the settings of a trial. filled_in: returns a trial
    of the spec with its winner; None leaves the trial out.
    """

    command: str  # its name: "tune local"
    rounds: Mapping[str, Choices]
    compares_targets: bool
    searched: Callable[[SearchContext], list[Searched]]  # every target with its default
    present: Callable[[TrialRequest, Trial], TrialRequest]
    filled_in: Callable[[TrialRequest, WorkloadRequest, Experiment, Findings], TrialRequest | None]


class RoundSearch:
    """The spaces and brackets of a method."""

    def __init__(self, method: SearchMethod, context: SearchContext) -> None:
        self._method = method
        self._rounds = list(method.rounds.values())
        self._context = context
        self._searched = {each.target: each for each in method.searched(context)}
        self.compares_targets = method.compares_targets

    def first_spaces(self) -> list[Space]:
        """Return the space of every target; empty ones state why in `left_out`."""
        return [self._first_space(each) for each in self._searched.values()]

    def bracket(self, space: Space) -> Bracket:
        return Bracket(
            space.target,
            space.candidates,
            self._context.settings,
            round_number=space.round_number,
        )

    def following(self, bracket: Bracket) -> Bracket | None:
        """Return the next round with candidates, on top of the winner of a finished one."""
        searched = self._searched.get(bracket.target)
        if searched is None or bracket.best is None:
            return None
        space = self._next_space(searched, bracket.best, bracket.round_number + 1)
        return None if space is None else self.bracket(space)

    def finals(self, spaces: Sequence[Space], brackets: Sequence[Bracket]) -> list[Bracket]:
        """Return the comparison of every winner with its default."""
        finals: list[Bracket] = []
        for space in spaces:
            best = [b.best for b in brackets if b.target == space.target and b.best is not None]
            if not best:
                continue
            winner, default = best[-1], space.default
            is_default = default is not None and default.configuration == winner.configuration
            if is_default and not self.compares_targets:
                continue
            candidates = [winner] if default is None or is_default else [default, winner]
            finals.append(FinalBracket(space.target, candidates, self._context.settings))
        return finals

    def _first_space(self, searched: Searched) -> Space:
        if searched.not_searched is not None:
            return _nothing(searched.target, searched.not_searched)
        if self.compares_targets:
            return self._space(searched, None, 0)
        try:
            default = self._context.planned(searched.target.workload, searched.request)
        except (UsageError, EnvironmentLacks) as error:
            return _nothing(searched.target, reason_of(error))
        space = self._next_space(searched, default, 0)
        if space is not None:
            return space
        return _nothing(
            searched.target, "nothing to choose: the spec says it all, or it has no effect"
        )

    def _next_space(self, searched: Searched, reached: Trial, first: int) -> Space | None:
        """Return the first round from number `first` on that has something to choose."""
        for number in range(first, len(self._rounds)):
            space = self._space(searched, reached, number)
            if len(space.candidates) > 1:
                return space
        return None

    def _space(self, searched: Searched, reached: Trial | None, number: int) -> Space:
        # the default keeps its words, so that what is left out is named by them
        present = searched.request
        if number > 0 and reached is not None:
            present = self._method.present(searched.request, reached)
        requests = [present, *self._rounds[number](searched, reached, self._context)]
        return space_of(searched.target, requests, self._context, round_number=number)


def _nothing(target: SearchTarget, reason: str) -> Space:
    left_out = (LeftOut(what="all", reason=reason),)
    return Space(target=target, candidates=(), has_default=False, left_out=left_out)
