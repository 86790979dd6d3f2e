"""Judge whether a resumed training continues as if it had never stopped, and name the causes.

Three trainings are compared: one that was stopped at a checkpoint, the one that continues it, and
one that was not stopped. What a checkpoint restores must be equal to what the uninterrupted
training has at this step; what is computed from it may differ by roundings.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from paceline.measure.records.own_steps import ResumedRank, ResumedStep, SignedSums, SumsByName

_EXACT = 2.0**-30  # for sums of float64
_ROUNDED = 2.0**-6  # relative difference of weights in a type of less precision
_COMPUTED = 2.0**-11  # relative difference of a gradient or a loss with other roundings
_NOISE = 2.0**-13  # share of the norm of all gradients below which one is noise
_LISTED = 2  # names in a sentence
_FEW_RATES = 2  # that show where a schedule is


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeFinding:
    """The result of one resumed training. passed: None if it is not shown."""

    passed: bool | None
    reasons: tuple[str, ...]  # sentences without full stops: all findings, the first one first
    step: int | None = None  # from 0, counted from the start of the uninterrupted training
    tensor: str | None = None
    saved_after: int | None = None  # steps before the checkpoint
    steps: int = 0  # that were compared


def position_of(stopped: Sequence[ResumedRank], continued: Sequence[ResumedRank]) -> int | None:
    """Return the step of the stopped training with whose weights the continued one begins.

    None if there is none. The last one counts if several have equal weights.
    """
    if not (stopped and continued and continued[0].steps):
        return None
    ours = continued[0].steps[0].total
    same = [s.step for s in stopped[0].steps if s.optimizer == 0 and _is_equal(s.total, ours)]
    saved = (stopped[0].saved_after or [0])[0]
    return saved if saved in same else max(same, default=None)


def judge_resume(
    stopped: Sequence[ResumedRank], continued: Sequence[ResumedRank], whole: Sequence[ResumedRank]
) -> ResumeFinding:
    """Compare the continued training with the uninterrupted one, rank by rank."""
    if not (stopped and continued and whole) or stopped[0].saved_after is None:
        return _not_shown("no checkpoint was found")
    saved = stopped[0].saved_after
    start = _first_difference_before(saved[0], stopped[0], whole[0])
    if start is not None:
        return _not_shown(start, saved[0])
    found = _Judgement(saved, continued, whole).finding()
    position = position_of(stopped, continued)
    if found.passed is False and position is not None and 0 < position < saved[0]:
        # A file was written after the checkpoint, or the script has several checkpoints.
        earlier = _Judgement([position, *saved[1:]], continued, whole).finding()
        if earlier.passed is not False:
            repeats = (
                f"it continues after step {position}: {_count(saved[0] - position, 'step')} of the "
                "stopped training, after this checkpoint, are trained again"
            )
            return ResumeFinding(
                passed=earlier.passed,
                reasons=(*earlier.reasons, repeats),
                saved_after=position,
                steps=earlier.steps,
            )
    return found


def _not_shown(reason: str, saved: int | None = None) -> ResumeFinding:
    return ResumeFinding(passed=None, reasons=(reason,), saved_after=saved)


def _first_difference_before(saved: int, stopped: ResumedRank, whole: ResumedRank) -> str | None:
    """Return why the stopped and the uninterrupted training cannot be compared, or None."""
    theirs = _by_key(whole)
    for step in stopped.steps:
        other = theirs.get((step.optimizer, step.step))
        if step.step >= saved or other is None:
            continue
        where = f"step {step.step + 1}, before the stop, differs between two trainings: "
        if step.samples != other.samples:
            return where + "samples; seed the script, so that it draws the same ones"
        if step.values != other.values:
            return where + (
                "learning rate or another value; the words of --stop-with change the schedule: "
                "leave them out, so that Paceline stops the script"
            )
        if not _is_equal(step.total, other.total, _COMPUTED):
            return where + (
                "weights; seed the script, and let it write its checkpoint in its working folder, "
                "not under an absolute path"
            )
    if not any(step.step >= saved for step in whole.steps):
        return (
            f"the checkpoint was written after the last step ({saved}) of the uninterrupted "
            "training; give the script more steps or epochs"
        )
    return None


class _Judgement:
    """Comparison of a continued training with an uninterrupted one from a step on.

    saved: steps of each optimiser before the checkpoint.
    """

    def __init__(
        self, saved: Sequence[int], continued: Sequence[ResumedRank], whole: Sequence[ResumedRank]
    ) -> None:
        self._saved = saved
        self._continued, self._whole = continued, whole
        self._same_ranks = len(continued) == len(whole)
        self._pairs = self._paired(continued[0], whole[0])
        self._wrong: dict[str, str] = {}  # causes, by kind
        self._first: tuple[int, str | None] | None = None  # step, tensor
        self._remarks: list[str] = []
        self._unknown: str | None = None

    def finding(self) -> ResumeFinding:
        if not self._pairs:
            return _not_shown("no step of both trainings could be compared", self._saved[0])
        self._judge_restored()
        self._judge_values()
        self._judge_samples()
        if not self._wrong and self._unknown is None:
            self._judge_computed()
        compared = sum(1 for ours, _ in self._pairs if ours.optimizer == 0)
        passed = False if self._wrong else None if self._unknown else True
        done = f"{_count(compared, 'step')} after step {self._saved[0]} agree"
        reasons = tuple(self._wrong.values()) or (self._unknown or done,)
        step, tensor = self._first or (None, None)
        return ResumeFinding(
            passed=passed,
            reasons=(*reasons, *self._remarks),
            step=step,
            tensor=tensor,
            saved_after=self._saved[0],
            steps=compared,
        )

    def _paired(
        self, continued: ResumedRank, whole: ResumedRank
    ) -> list[tuple[ResumedStep, ResumedStep]]:
        theirs = _by_key(whole)
        pairs = []
        for ours in continued.steps:
            saved = self._saved[ours.optimizer] if ours.optimizer < len(self._saved) else 0
            other = theirs.get((ours.optimizer, ours.step + saved))
            if other is not None:
                pairs.append((ours, other))
        return pairs

    def _fail(self, kind: str, step: int, reason: str, tensor: str | None = None) -> None:
        self._wrong.setdefault(kind, reason)
        if self._first is None or step < self._first[0]:
            self._first = (step, tensor)

    # --- what the checkpoint must restore ---

    def _judge_restored(self) -> None:
        firsts = [pair for pair in self._pairs if pair[0].step == 0]
        for ours, theirs in firsts:
            self._judge_weights(ours, theirs)
            self._judge_moments(ours, theirs)
            self._judge_scaler(ours, theirs)
            for kind, words in _WORDS.items():
                names = _different(getattr(ours.state, kind), getattr(theirs.state, kind))
                if names:
                    self._fail(kind, theirs.step, words.format(names=_some(names)), names[0])

    def _judge_weights(self, ours: ResumedStep, theirs: ResumedStep) -> None:
        names = _different(ours.state.weights, theirs.state.weights)
        if not names:
            return
        older = [
            step.step
            for step in self._whole[0].steps
            if step.optimizer == ours.optimizer and _is_equal(step.total, ours.total)
        ]
        largest = max(
            _difference(ours.state.weights[name], theirs.state.weights[name])
            / (_norm(theirs.state.weights[name]) or 1.0)
            for name in names
        )
        if older and older[-1] == 0:
            reason = "the weights are the initial ones: they were not restored"
        elif older:
            when = "older" if older[-1] < theirs.step else "later"
            reason = f"the weights are {when}: those after step {older[-1]}"
        elif len(names) == len(theirs.state.weights) and largest < _ROUNDED:
            reason = (
                "the weights differ a little: perhaps the checkpoint has averaged weights, or a "
                "type of less precision"
            )
        else:
            reason = f"other weights than in the uninterrupted training: {_some(names)}"
        self._fail("weights", theirs.step, reason, names[0])

    def _judge_moments(self, ours: ResumedStep, theirs: ResumedStep) -> None:
        own, other = ours.state.moments, theirs.state.moments
        lost = sorted(set(other) - set(own))
        if lost:
            self._fail(
                "moments", theirs.step,
                f"moments lost: the state of the optimiser was not restored ({_some(lost)})",
                lost[0],
            )  # fmt: skip
            return
        names = _different(own, other)
        if names:
            self._fail(
                "moments", theirs.step,
                f"the state of the optimiser differs ({_some(names)})", names[0],
            )  # fmt: skip

    def _judge_scaler(self, ours: ResumedStep, theirs: ResumedStep) -> None:
        names = [key for key, value in theirs.scaler.items() if ours.scaler.get(key) != value]
        if not names:
            return
        beginning = next(iter(self._whole[0].steps)).scaler
        scale = next((key for key in names if key.endswith("scale")), names[0])
        new = "is new: it was not restored" if ours.scaler == beginning else "differs"
        self._fail(
            "scaler", theirs.step,
            f"the gradient scaler {new} ({scale} is {ours.scaler.get(scale):g} instead of "
            f"{theirs.scaler[scale]:g})",
        )  # fmt: skip

    # --- learning rates and other values ---

    def _judge_values(self) -> None:
        for ours, theirs in self._pairs:
            names = [k for k, v in theirs.values.items() if not _is_close(ours.values.get(k), v)]
            rates = [name for name in names if name.endswith(".lr")]
            for name in rates[:1] or names[:1]:
                self._fail("values", theirs.step, self._of_value(name, ours, theirs))
                return

    def _of_value(self, name: str, ours: ResumedStep, theirs: ResumedStep) -> str:
        is_rate = name.endswith(".lr")
        label = "learning rate" if is_rate else f"value {name.partition('.')[2]}"
        own, other = ours.values.get(name), theirs.values[name]
        numbers = f"{label} {'none' if own is None else f'{own:.6g}'} instead of {other:.6g}"
        if not is_rate:
            return numbers
        history = [s for s in self._whole[0].steps if s.optimizer == ours.optimizer]
        rates = [step.values.get(name) for step in history]
        run = [a.values.get(name) for a, _ in self._pairs if a.optimizer == ours.optimizer]
        for shift in range(len(rates)):
            if len(rates[shift:]) >= min(len(run), _FEW_RATES) and all(
                _is_close(a, b) for a, b in zip(rates[shift:], run, strict=False) if b is not None
            ):
                if shift == 0:
                    return f"schedule restarted: {numbers}, as in step 1"
                if shift != theirs.step - ours.step:
                    off = shift - (theirs.step - ours.step)
                    side = "ahead" if off > 0 else "behind"
                    return f"the schedule is {_count(abs(off), 'step')} {side}: {numbers}"
        return f"the schedule was not restored: {numbers}"

    # --- samples ---

    def _judge_samples(self) -> None:
        pairs = [(ours, theirs) for ours, theirs in self._pairs if ours.optimizer == 0]
        if any(step.samples is None for pair in pairs for step in pair):
            self._remarks.append("samples were not compared: no batch was seen")
            return
        history = _samples_by_step(self._whole)
        own = _samples_by_step(self._continued)
        if not self._same_ranks and len(own[0]) != len(history.get(self._saved[0], ())):
            self._judge_other_batch(history, own)
            return
        for ours, theirs in pairs:
            mine, other = own.get(ours.step, Counter()), history.get(theirs.step, Counter())
            if mine != other:
                self._fail("samples", theirs.step, self._of_samples(mine, theirs.step, history))
                return

    def _of_samples(
        self, mine: Counter[str], step: int, history: Mapping[int, Counter[str]]
    ) -> str:
        same = [number for number, rows in history.items() if rows == mine]
        before = [number for number in same if number < self._saved[0]]
        if before:
            return f"samples repeated: step {step + 1} trains on those of step {before[-1] + 1}"
        if same and same[0] > step:
            return (
                f"samples skipped: step {step + 1} trains on those of step {same[0] + 1}, "
                f"{_count(same[0] - step, 'step')} too late"
            )
        if same:
            return f"samples repeated: step {step + 1} trains on those of step {same[-1] + 1}"
        earlier = sum((history[n] for n in history if n < self._saved[0]), Counter[str]())
        known = sum(history.values(), Counter[str]())
        rows = sum(mine.values())
        if repeated := sum((mine & earlier).values()):
            return (
                f"samples in another order: {repeated} of {rows} in step {step + 1} were trained "
                "on before the stop (generator or epoch of the sampler not restored)"
            )
        if mine & known:
            return (
                f"samples in another order from step {step + 1} on (generator or epoch of the "
                "sampler not restored)"
            )
        return (
            f"step {step + 1} has samples that the uninterrupted training does not have (another "
            "order, or random changes of samples whose generator was not restored)"
        )

    def _judge_other_batch(
        self, history: Mapping[int, Counter[str]], own: Mapping[int, Counter[str]]
    ) -> None:
        before = sum((history[n] for n in history if n < self._saved[0]), Counter[str]())
        after = sum((history[n] for n in history if n >= self._saved[0]), Counter[str]())
        repeated = [n for n, rows in own.items() if (rows & before) and not rows & after]
        if repeated:
            self._fail(
                "samples", self._saved[0] + repeated[0],
                "samples repeated: they were trained on before the stop",
            )  # fmt: skip
            return
        self._unknown = (
            f"a step has {sum(own[0].values())} samples after the stop and "
            f"{sum(history[self._saved[0]].values())} before it, so its gradient cannot be "
            "compared; the restored state is equal"
        )

    # --- what is computed from it ---

    def _judge_computed(self) -> None:
        for ours, theirs in self._pairs:
            if not self._has_equal_result(ours, theirs):
                return
        if drawn := self._other_generators(*self._pairs[0]):
            self._remarks.append(
                f"the generator of {_some(drawn)} was not restored; no compared step shows a "
                "difference"
            )

    def _has_equal_result(self, ours: ResumedStep, theirs: ResumedStep) -> bool:
        """Return whether a step computes the same from equal samples, weights and moments."""
        scale = _power_of_two(ours.losses, theirs.losses)
        if scale is not None:
            self._fail(
                "scaler", theirs.step,
                f"the loss is scaled by {scale:g} times the factor of the uninterrupted training: "
                "the gradient scaler was not restored",
            )  # fmt: skip
            return False
        own, other = ours.state.gradient, theirs.state.gradient
        drawn = self._other_generators(ours, theirs)
        if drawn and (exact := _different(own, other)):
            self._fail(
                "generator", theirs.step,
                f"generator not restored: {_some(drawn)} (dropout and other random numbers "
                "differ)", exact[0],
            )  # fmt: skip
            return False
        least = _NOISE * math.hypot(*map(_norm, other.values()))
        names = [name for name in _different(own, other, _COMPUTED) if _norm(other[name]) > least]
        if not names:
            return True
        if self._same_ranks:
            self._fail(
                "gradient", theirs.step,
                f"the gradient of {_some(names)} differs, with equal samples and weights", names[0],
            )  # fmt: skip
        else:
            self._unknown = (
                f"the gradient of {_some(names)} differs in step {theirs.step + 1}, as it may with "
                "another number of ranks (batch normalisation, dropout); the restored state, the "
                "samples and the schedule are equal"
            )
        return False

    def _other_generators(self, ours: ResumedStep, theirs: ResumedStep) -> list[str]:
        """Return the generators of ranks that differ; none if the number of ranks does.

        Those that no step of the uninterrupted training uses are left out: an unseeded one always
        differs.
        """
        found = []
        key, other_key = (ours.optimizer, ours.step), (theirs.optimizer, theirs.step)
        ranks = zip(self._continued, self._whole, strict=True) if self._same_ranks else ()
        for rank, (own, other) in enumerate(ranks):
            mine, wanted = _by_key(own).get(key), _by_key(other).get(other_key)
            if mine is not None and wanted is not None:
                where = f" of rank {rank}" if len(self._whole) > 1 else ""
                found += [
                    name + where
                    for name, state in wanted.generators.items()
                    if mine.generators.get(name, state) != state and _is_used(name, other)
                ]
        return found


_WORDS = {
    "copies": "a module that no optimiser trains differs, such as averaged weights ({names}): it "
    "was not restored",
    "buffers": "buffers were not restored: {names}",
}


def _by_key(rank: ResumedRank) -> dict[tuple[int, int], ResumedStep]:
    return {(step.optimizer, step.step): step for step in rank.steps}


def _is_used(generator: str, rank: ResumedRank) -> bool:
    return len({step.generators.get(generator) for step in rank.steps}) > 1


def _samples_by_step(ranks: Iterable[ResumedRank]) -> dict[int, Counter[str]]:
    """Return the samples of all ranks in each step of the first optimiser."""
    found: dict[int, Counter[str]] = {}
    for rank in ranks:
        for step in rank.steps:
            if step.optimizer == 0:
                found.setdefault(step.step, Counter()).update(step.samples or [])
    return found


def _different(ours: SumsByName, theirs: SumsByName, limit: float = _EXACT) -> list[str]:
    """Return the names of tensors that differ, the most different one first.

    Only names that both have with equal sizes are compared.
    """
    differences = {
        name: _difference(ours[name], other) / (_norm(other) or 1.0)
        for name, other in theirs.items()
        if name in ours and ours[name][0] == other[0]
    }
    return sorted((n for n, d in differences.items() if d > limit), key=lambda n: -differences[n])


def _difference(ours: SignedSums, theirs: SignedSums) -> float:
    """Return an estimate of the L2 norm of the difference of two tensors."""
    return math.hypot(*(a - b for a, b in zip(ours[1:], theirs[1:], strict=True)))


def _norm(tensor: SignedSums) -> float:
    return math.hypot(*tensor[1:])


def _is_equal(ours: SignedSums, theirs: SignedSums, limit: float = _EXACT) -> bool:
    return ours[0] == theirs[0] and _difference(ours, theirs) <= limit * _norm(theirs)


def _is_close(ours: float | None, theirs: float | None) -> bool:
    if ours is None or theirs is None:
        return ours is theirs
    return math.isclose(ours, theirs, rel_tol=1e-9, abs_tol=1e-30)


def _power_of_two(ours: Sequence[float], theirs: Sequence[float]) -> float | None:
    """Return the power of two, except 1, by which all losses differ; None if there is none."""
    if len(ours) != len(theirs) or not all((*ours, *theirs)):
        return None
    factors = {math.frexp(a / b) for a, b in zip(ours, theirs, strict=True)}
    if len(factors) != 1:
        return None
    mantissa, exponent = factors.pop()
    return 2.0 ** (exponent - 1) if mantissa == 0.5 and exponent != 1 else None


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more


def _count(number: int, unit: str) -> str:
    return f"{number} {unit}{'' if number == 1 else 's'}"
