"""Say what is shown of a layout: by its ranks against each other, and by a reference.

The reference is one process, or the script on some ranks. The comparison with it counts where the
samples are equal; a layout whose samples, start or random numbers differ may be right, and only its
ranks judge it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from paceline.analysis.equivalence.exchange import near
from paceline.analysis.equivalence.observed import LayoutFinding
from paceline.analysis.equivalence.own_checks import Level, RankFinding
from paceline.analysis.equivalence.ranks import RanksFinding, Statement, statement_of
from paceline.analysis.equivalence.sample_log import some
from paceline.measure.records.own_steps import COMPRESSED, UNEVEN

# Differences that are faults although ranks agree with each other.
_FAULTS = {"gradient", "loss", "update", "replicas"}
_LEVELS = {  # of others
    "module": Level.WEAKER,
    "loss": Level.WEAKER,
    "inputs": Level.SUSPICION,
    "labels": Level.SUSPICION,
}
# Findings of ranks with which equal rows have other gradients than in one process.
_OF_OWN_ROWS = {"batch-norm", "mixed-rows", "gathered"}
# Findings of ranks that explain a difference from the reference, by its kind.
_EXPLAINS = {
    "gradient": {"constant-buffers", "clipped-scaled", "combined", "inside", "terms"},
    "loss": {"constant-buffers", "gathered", "inside", "terms"},
    "update": {"clipped-scaled", "rate"},
    "module": {"constant-buffers"},
}
# Kinds of training that are meant to differ from one process.
_BY_DESIGN = {"averaged", "rounded", COMPRESSED, UNEVEN}
_NOTHING = "zero"  # gradients show nothing, also if they are those of one process
_OTHER_MODULE = "reference module"  # kind of a finding

# Findings that a user may know to be meant, by the names with which they are accepted.
ACCEPTABLE = {
    "batch-norm": (Level.REMARK, "batch-norm"),
    "running-statistics": (Level.REMARK, "statistics"),
    "no-optimiser": (Level.REMARK, "no-optimiser"),
    "loss-factor": (Level.REMARK, "total"),
    "total-weight": (Level.WEAKER, "total"),
    "unknown-rows": (Level.WEAKER, "no-rows"),
    "shared-rows": (Level.WEAKER, "shared-rows"),
    "equal-gradients": (Level.WEAKER, "equal-gradients"),
    "rounded-mean": (Level.WEAKER, "rounded"),
    "no-loss-terms": (Level.WEAKER, "no-terms"),
    "loss-terms": (Level.WEAKER, "terms"),
    "loss-term": (Level.WEAKER, "unknown-term"),
    "nonlinear-loss": (Level.WEAKER, "not-linear"),
    "changed-rows": (Level.WEAKER, "changed-rows"),
    "mixed-rows": (Level.WEAKER, "mixed-rows"),
    "rows-of-all": (Level.WEAKER, "gathered"),
    "passes": (Level.WEAKER, "passes"),
    "combined-losses": (Level.WEAKER, "combined"),
    "module": (Level.WEAKER, _OTHER_MODULE),
    "lost-gradient": (Level.SUSPICION, "gathered"),
    "zero-term": (Level.SUSPICION, "terms"),
    "divided-passes": (Level.SUSPICION, "passes"),
    "sum-of-ranks": (Level.SUSPICION, "summed"),
    "fewer-rows": (Level.SUSPICION, "rows"),
    "rate": (Level.SUSPICION, "rate"),
    "other-labels": (Level.SUSPICION, "reference labels"),
}
_NAMES = {finding: name for name, finding in ACCEPTABLE.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """The highest statement that is true of a layout, and all findings, the cause first.

    options: without which less would be shown, as the user types them.
    """

    statement: Statement
    findings: tuple[RankFinding, ...]
    steps: int  # that were compared, from the first one on
    last: int  # that were compared at the end of the training
    rows: tuple[int, ...]  # of each rank in the first step
    options: str = ""

    @property
    def is_suspicious(self) -> bool:
        return any(each.level == Level.SUSPICION for each in self.findings)

    @property
    def has_roundings(self) -> bool:
        """Return whether weights or gradients of ranks differ in their last bits."""
        kinds = {each.kind for each in self.findings if each.level == Level.REMARK}
        return bool(kinds & {"start", "drift", "used"})

    @property
    def is_to_be_compared(self) -> bool:
        """Return whether a comparison of tensors may show more than the ranks do."""
        nothing = any(each.kind == _NOTHING for each in self.findings)
        return Statement.EQUAL < self.statement < Statement.WRONG and not nothing

    @property
    def step(self) -> int | None:
        """Return the step of the first fault."""
        return next((each.step for each in self.findings if each.level == Level.FAULT), None)

    @property
    def words(self) -> str:
        """Return the statement in words, without the findings."""
        words = self.statement.words
        if self.options:
            words += f", with {self.options}"
        if self.statement <= Statement.MEAN and self.steps:
            words += ", in the first " + (f"{self.steps} steps" if self.steps > 1 else "step")
        if self.last and self.statement == Statement.EQUAL:
            words += f"; ranks agree in the last {self.last}"
        elif self.last and self.statement <= Statement.MEAN:
            words += f" and the last {self.last}"
        if self.statement == Statement.DATA_PARALLEL and any(self.rows):
            equal = len(set(self.rows)) == 1
            rows = f"{len(self.rows)} \u00d7 {self.rows[0]}" if equal else some(self.rows)
            words += f" ({rows} rows)"
        return words

    @property
    def sentences(self) -> list[str]:
        """Return the statement and the findings, without their full stops."""
        return [self.words, *(each.sentence for each in self.findings)]

    def beside(self, finding: RankFinding) -> Shown:
        """Return this with one more finding, which comes first and may weaken the statement."""
        statement = max(self.statement, statement_of([finding]))
        return replace(self, findings=(finding, *self.findings), statement=statement)

    @property
    def acceptable(self) -> list[str]:
        """Return the names with which the findings that weaken the statement can be accepted.

        Empty if one of them cannot.
        """
        weaken = [each for each in self.findings if each.level != Level.REMARK]
        names = [_name(each) for each in weaken]
        return [] if None in names else [name for name in names if name is not None]


REFERENCE_SHOWN = Shown(statement=Statement.EQUAL, findings=(), steps=0, last=0, rows=())


def shown(
    compared: LayoutFinding,
    ranks: RanksFinding,
    reference: Statement = Statement.EQUAL,
    options: str = "",
    accept: Collection[str] = (),
) -> Shown:
    """Return what both comparisons show together.

    compared: with the reference, with `options`. reference: what is shown of it; one process is
    right by itself. accept: names in ACCEPTABLE.
    """
    found = list(ranks.findings)
    statement, by_reference = ranks.statement, True
    is_zero = any(each.kind == _NOTHING for each in found)
    by_design = any(each.kind in _BY_DESIGN for each in found)
    drifts = any(each.level == Level.FAULT and each.kind == "drift" for each in found)
    if compared.kind == "start-of-rank" and drifts:
        found.insert(0, _as_finding(compared, Level.FAULT))  # from which the others follow
    elif _is_fault(compared, ranks) and not by_design:
        if not _is_known(compared, found):
            found.insert(0, _as_finding(compared, Level.FAULT))
            found = _with_cause_first(compared, found)
        statement = Statement.WRONG
    elif any(e.kind == "no-optimiser" and e.tensor == compared.tensor for e in found):
        found.insert(0, _as_finding(compared, Level.FAULT))  # the reference steps it
        statement = Statement.WRONG
    elif compared.passed and reference < statement < Statement.WRONG and not is_zero:
        found = [
            each
            for each in found
            if each.level == Level.REMARK or (ranks.last and (each.step or 0) >= compared.steps)
        ]
        statement = reference
    else:
        by_reference = False
        if not compared.passed:
            level = _LEVELS.get(compared.kind, Level.REMARK)
            if compared.kind == "labels" and any(each.kind in _OF_OWN_ROWS for each in found):
                level = Level.REMARK
            added = _as_finding(compared, level)
            found.insert(0 if added.level == Level.SUSPICION else len(found), added)
    if compared.passed and reference > Statement.EQUAL:
        reason = f"equal to {compared.reference} on the same samples, with {options}"
        found.append(RankFinding(level=Level.REMARK, kind="reference", reason=reason))
    if compared.limit:
        found.append(RankFinding(level=Level.REMARK, kind="noise", reason=compared.limit))
    accepted = [n for n in ACCEPTABLE if n in accept and any(_name(each) == n for each in found)]
    found = [each for each in found if _name(each) not in accepted]
    if not by_reference:
        statement = statement_of(found)
    named = [options] if by_reference and options else []
    if accepted:
        named.append(f"--accept {','.join(accepted)}")
    return Shown(
        statement=statement,
        findings=tuple(found),
        steps=_steps_of(compared, ranks, statement),
        last=ranks.last,
        rows=ranks.rows,
        options=" ".join(named),
    )


def _steps_of(compared: LayoutFinding, ranks: RanksFinding, statement: Statement) -> int:
    """Return how many first steps the statement is about."""
    if compared.limit and statement == Statement.EQUAL:
        return compared.steps
    return max(compared.steps if compared.passed else 0, ranks.steps)


def _name(finding: RankFinding) -> str | None:
    """Return the name with which a finding can be accepted."""
    return _NAMES.get((finding.level, finding.kind))


def _is_known(finding: LayoutFinding, found: Sequence[RankFinding]) -> bool:
    """Return whether the ranks show a fault from which the difference follows."""
    return any(
        each.level == Level.FAULT and (each.step or 0) <= (finding.step or 0) for each in found
    )


def _is_fault(compared: LayoutFinding, ranks: RanksFinding) -> bool:
    """Return whether a difference from the reference is a fault.

    A loss that combines rows with each other depends on which ones a rank has. Where ranks use the
    exact mean of their own gradients, it may be meant so, unless these are a multiple, or begin to
    differ within the model.
    """
    if compared.passed is not False or compared.kind not in _FAULTS:
        return False
    mixes = any(each.kind == "mixed-rows" for each in ranks.findings)
    is_lost = any(_name(each) == "lost-gradient" for each in ranks.findings)
    of_loss = compared.kind in {"loss", "gradient"} and (is_lost or not compared.is_within)
    is_own = of_loss and not _is_of_ranks(compared, len(ranks.rows))
    return not (is_own and mixes and ranks.statement == Statement.MEAN)


def _is_of_ranks(compared: LayoutFinding, ranks: int) -> bool:
    """Return whether a gradient is that of the reference times or divided by the ranks."""
    multiples = (float(ranks), 1 / ranks) if ranks > 1 else ()
    return any(near(compared.factor, each, 1e-3) for each in multiples)


def _with_cause_first(compared: LayoutFinding, found: Sequence[RankFinding]) -> list[RankFinding]:
    """Return the findings, first what ranks show by themselves and the difference follows from."""
    kinds = _EXPLAINS.get(compared.kind, set())
    causes = [e for e in found if e.kind in kinds and (e.step or 0) <= (compared.step or 0)]
    rest = [each for each in found if each not in causes]
    return [*(replace(each, level=Level.FAULT) for each in causes), *rest]


def _as_finding(finding: LayoutFinding, level: Level) -> RankFinding:
    is_plain = level in (Level.FAULT, Level.SUSPICION)
    beside = "" if is_plain else f"not compared with {finding.reference}: "
    return RankFinding(
        level=level,
        kind=f"reference {finding.kind}",
        reason=beside + finding.reason,
        step=finding.step,
        tensor=finding.tensor,
        factor=finding.factor,
    )
