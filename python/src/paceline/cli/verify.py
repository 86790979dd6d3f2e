"""`paceline verify`: does a training script train the same in every layout?"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import click

from paceline.analysis.equivalence.ranks import Statement
from paceline.analysis.equivalence.shown import ACCEPTABLE, Shown
from paceline.base.errors import ExitCode
from paceline.base.host.messages import say
from paceline.cli.console import plain_console, print_json
from paceline.cli.experiment import (
    ExperimentCommand,
    ScriptOptions,
    is_script,
    module_option,
    script_experiment,
    vary_option,
)
from paceline.cli.options import count, json_option, list_option, out_option, seed
from paceline.cli.progress import ConsoleProgress
from paceline.measure.records.files import fields_of
from paceline.plan.spec.loading import Spec, load_spec
from paceline.plan.trials.trial import Alterations, Trial
from paceline.runner.trials.directory import default_run_dir
from paceline.runner.trials.planning import plan
from paceline.runner.trials.verify_resume import (
    ResumeRequest,
    VerifiedResume,
    verify_resume,
)
from paceline.runner.trials.verify_script import (
    Equalising,
    VerifiedLayout,
    VerifiedScript,
    verify_script,
)
from paceline.show.report.columns import MARK_STYLES
from paceline.show.report.section import Cell, Column, Section, Table, terminal_view
from paceline.show.report.wording import STATEMENT_MARKS

_STEPS = 4
# Options that may make a script comparable with its reference, by the difference that hinders it.
_ADVICE: dict[str, tuple[str, ...]] = {
    "start": ("--seed 1", "--same-start"),
    "samples": ("--share BATCH_OPTION=N", "--seed 1", "--reference-ranks N"),
    "random": ("--no-dropout",),
    "module": ("--no-dropout",),
    "not-run": ("--reference-ranks N",),
}
_MARKS = {True: ("✓", "yes"), False: ("✗", "no"), None: ("?", "unknown")}
_CODES = {True: ExitCode.OK, False: ExitCode.NOT_EQUIVALENT, None: ExitCode.NOT_COMPARABLE}


def _words_of_script(
    _context: click.Context, _parameter: click.Parameter, value: str | None
) -> tuple[str, ...] | None:
    """Return the words of an option, as a shell splits them; None if it is not given."""
    try:
        return None if value is None else tuple(shlex.split(value))
    except ValueError as error:
        raise click.BadParameter(f"{value!r}: {error}; expected words as in a shell") from error


def _compared_steps(
    _context: click.Context, _parameter: click.Parameter, value: str
) -> tuple[int, int]:
    """Return how many first and last steps are compared."""
    found = re.fullmatch(r"(?:first:)?([1-9]\d*)(?:,last:(\d+))?", value)
    if found is None:
        raise click.BadParameter(f"expected N, or first:N,last:M such as first:4,last:2: {value!r}")
    return int(found[1]), int(found[2] or 0)


def _share(
    _context: click.Context, _parameter: click.Parameter, value: str | None
) -> tuple[str, int] | None:
    """Return an option of the script, and its value for one process."""
    if value is None:
        return None
    option, _, number = value.rpartition("=")
    if not (option and number.isdecimal() and int(number)):
        raise click.BadParameter(f"expected OPTION=N such as --batch-size=32, got {value!r}")
    return option, int(number)


def _check_accepted(names: Sequence[str]) -> None:
    """Raise click.BadParameter for a name of no finding that can be accepted."""
    unknown = [name for name in names if name not in ACCEPTABLE]
    if unknown:
        raise click.BadParameter(
            f"{', '.join(unknown)}: expected {', '.join(ACCEPTABLE)}", param_hint="--accept"
        )


@click.command("verify", cls=ExperimentCommand)
@click.argument("spec", metavar="SCRIPT.py")
@click.argument("script_arguments", metavar="[ARGS...]", nargs=-1, type=click.UNPROCESSED)
@list_option("--launcher", "NAME,…", "Launchers of several ranks; default: torchrun.")
@list_option("--transport", "NAME,…", "Transports between ranks; default: gloo.")
@click.option(
    "--ranks",
    "--nproc-per-node",
    metavar="N",
    type=count,
    default=2,
    help="Ranks of each layout; they may share cores.",
)
@vary_option
@module_option
@click.option(
    "--steps",
    metavar="N|first:N,last:M",
    callback=_compared_steps,
    default=str(_STEPS),
    help="Compare so many first steps of the optimiser, and ranks with each other in so many last "
    "ones, which costs as much in every step; the script then runs to its end.",
)
@click.option(
    "--seed",
    "altered_seed",
    metavar="N",
    type=seed,
    help="Compare with one process after all generators were seeded with N, before the script.",
)
@click.option(
    "--no-dropout", is_flag=True, help="Compare with one process without dropout in both."
)
@click.option(
    "--share",
    metavar="OPTION=N",
    callback=_share,
    help="An option of the script, as --batch-size=32: one process gets N, a rank its share of N.",
)
@click.option(
    "--same-start",
    is_flag=True,
    help="Compare with one process after each layout got the weights with which that starts.",
)
@click.option(
    "--reference-ranks",
    metavar="N",
    type=count,
    help="Compare with the script on N ranks instead of one process.",
)
@list_option("--accept", "NAME,…", "Findings that are meant, as the verdict names them.")
@click.option(
    "--resume-with",
    metavar="WORDS",
    callback=_words_of_script,
    help="Show whether a stopped training continues as if it had never stopped: WORDS, as "
    "'--resume ckpt.pt', are added to the script's arguments to resume it; '' for a script that "
    "resumes by itself.",
)
@click.option(
    "--resume-ranks", metavar="N", type=count, help="Resume with so many ranks; default: --ranks."
)
@click.option(
    "--stop-with",
    metavar="WORDS",
    callback=_words_of_script,
    help="Add WORDS, as '--epochs 1', to the script's arguments so that it stops; default: end it "
    "at the first checkpoint in its working folder.",
)
@click.option(
    "--stop-after",
    metavar="N",
    type=count,
    default=2,
    help="Without --stop-with: end it after N steps at the earliest.",
)
@click.option(
    "--strict",
    is_flag=True,
    help="End with 7 where it is only shown that ranks agree and use the mean of their gradients.",
)
@out_option("RUN_DIR", "Write the run here; default: runs/verify-NAME-DATE-TIME.")
@click.option("-q", "--quiet", is_flag=True, help="Show no progress.")
@json_option
def command(
    spec: str,
    script_arguments: tuple[str, ...],
    launcher: tuple[str, ...],
    transport: tuple[str, ...],
    ranks: int,
    vary: tuple[tuple[str, ...], ...],
    module: bool | None,
    steps: tuple[int, int],
    altered_seed: int | None,
    no_dropout: bool,
    share: tuple[str, int] | None,
    same_start: bool,
    reference_ranks: int | None,
    accept: tuple[str, ...],
    resume_with: tuple[str, ...] | None,
    resume_ranks: int | None,
    stop_with: tuple[str, ...] | None,
    stop_after: int,
    strict: bool,
    out: Path | None,
    quiet: bool,
    as_json: bool,
) -> int:  # fmt: skip
    """Show whether a training script is trained right by several ranks.

    The script runs unchanged: in each layout, where ranks are checked against each other, and in
    one process. A ✗ names the first step that is wrong, the tensor, and the likely cause.
    """
    if not is_script(spec, module):
        raise click.UsageError(f"{spec}: expected a script (FILE.py, or -m MODULE)")
    _check_accepted(accept)
    first_steps, last_steps = steps
    options = ScriptOptions(
        launcher=launcher,
        transport=transport,
        ranks=ranks,
        local_strategy=("processes",),
        max_steps=first_steps,
        warmup_steps=0,
        vary=vary,
        module=module,
    )
    altered = Alterations(seed=altered_seed, no_dropout=no_dropout, same_start=same_start)
    equalising = Equalising(altered=altered if altered != Alterations() else None, share=share)
    if resume_with is not None:
        if equalising.words or reference_ranks or accept or last_steps:
            raise click.UsageError(
                "--resume-with: expected no option that makes a script equal to its reference "
                "(--seed, --no-dropout, --share, --same-start, --reference-ranks, --accept), and "
                "only first --steps"
            )
        request = ResumeRequest(
            resume_with=resume_with, stop_with=stop_with, stop_after=stop_after, steps=first_steps
        )
        layouts = [
            _loaded(spec, script_arguments, _one_layout(options, number))
            for number in (ranks, resume_ranks or ranks)
        ]
        run_dir = out or default_run_dir(f"verify-{layouts[0].experiment.name}")
        with ConsoleProgress(quiet=quiet) as progress:
            resumed = verify_resume(layouts[0], layouts[1], run_dir, request, progress=progress)
        return _show_resumed(resumed, as_json=as_json)
    if resume_ranks or stop_with is not None:
        raise click.UsageError("--resume-ranks, --stop-with: expected only with --resume-with")
    for number in (ranks, reference_ranks or 1):
        if share is not None and share[1] % number:
            raise click.UsageError(
                f"--share {share[0]}={share[1]}: expected a number that {number} ranks divide"
            )
    loaded = _loaded(spec, script_arguments, options)
    if reference_ranks is not None and reference_ranks > 1:
        reference = _reference(spec, script_arguments, replace(options, ranks=reference_ranks))
        equalising = replace(equalising, reference=reference)
    run_dir = out or default_run_dir(f"verify-{loaded.experiment.name}")
    with ConsoleProgress(quiet=quiet) as progress:
        verified = verify_script(
            loaded,
            plan(loaded),
            run_dir,
            equalising,
            accept,
            last_steps=last_steps,
            progress=progress,
        )
    if as_json:
        print_json(fields_of(verified))
    else:
        plain_console().print(terminal_view(_section(verified)))
        for layout in verified.layouts:
            if layout.failure is not None:
                say(layout.failure)
    return max(_code(each, strict=strict) for each in verified.layouts)


def _code(layout: VerifiedLayout, *, strict: bool) -> int:
    shown = layout.shown
    if shown.statement == Statement.WRONG:
        return ExitCode.NOT_EQUIVALENT
    weak = shown.statement == Statement.MEAN and (strict or shown.is_suspicious)
    if weak or shown.statement == Statement.NOT_SHOWN:
        return ExitCode.NOT_COMPARABLE
    return ExitCode.OK


def _loaded(spec: str, arguments: Sequence[str], options: ScriptOptions) -> Spec:
    source = script_experiment(spec, arguments, options)
    for trial in source["trials"]:
        if "ranks_per_node" in trial:
            trial["oversubscribe"] = True  # nothing is timed
    return load_spec({**source, "repeats": 1, "telemetry": {"enabled": False}})


def _reference(spec: str, arguments: Sequence[str], options: ScriptOptions) -> Trial:
    """Return the trial of several ranks with which layouts are compared."""
    first = replace(
        options, launcher=options.launcher[:1], transport=options.transport[:1], vary=()
    )
    [found] = [t for t in plan(_loaded(spec, arguments, first)).trials if not t.is_baseline]
    return found


def _one_layout(options: ScriptOptions, ranks: int) -> ScriptOptions:
    """Return the options for one number of ranks; one rank is the baseline itself."""
    if max(map(len, (options.launcher, options.transport, options.vary))) > 1:
        raise click.UsageError("--resume-with: expected one launcher, transport and layout")
    if ranks > 1:
        return replace(options, ranks=ranks)
    return replace(
        options, ranks=None, launcher=(), transport=(), vary=(), local_strategy=("sequential",)
    )


def _words(layout: VerifiedLayout) -> str:
    trial = layout.trial
    return " ".join([trial.launcher, trial.transport, trial.layout, *trial.arguments])


def _mark_of(passed: bool | None) -> Cell:
    text, style = _MARKS[passed]
    return Cell(text, style=style)


def _step(step: int | None) -> str:
    return "" if step is None else f"step {step + 1}"


_COLUMNS: tuple[Column[VerifiedLayout], ...] = (
    Column("", lambda layout: _mark(layout.shown), "name"),
    Column("layout", _words, "text"),
    Column("first\nfault", lambda layout: _step(layout.shown.step), "name"),
    Column("what is shown", lambda layout: "\n- ".join(layout.shown.sentences), "text"),
)


def _mark(shown: Shown) -> Cell:
    text = STATEMENT_MARKS[shown.statement]
    return Cell(text, style=MARK_STYLES[text])


def _section(verified: VerifiedScript) -> Section:
    """Return a line for each layout, and a sentence about all of them."""
    sentence = {
        Statement.EQUAL: "Every layout trains what one process trains, as far as it was compared.",
        Statement.DATA_PARALLEL: "Every layout trains on the mean loss over all ranks' rows.",
        Statement.MEAN: "Ranks agree with each other; more is not shown.",
        Statement.NOT_SHOWN: "It is not shown that every layout trains right.",
        Statement.WRONG: "A layout trains wrong.",
    }[verified.statement]
    sentences = [sentence, *_advice(verified)]
    return Section(table=Table(columns=_COLUMNS, items=verified.layouts), sentences=sentences)


def _advice(verified: VerifiedScript) -> Iterator[str]:
    """Name options that were not given and may show more."""
    given = verified.options.split()
    shown = (Statement.DATA_PARALLEL, Statement.MEAN, Statement.NOT_SHOWN)
    layouts = [each for each in verified.layouts if each.shown.statement in shown]
    options = set()
    for finding in (each.finding for each in layouts):
        if finding.kind == "module" and not finding.draws:
            continue
        useful = [e for e in _ADVICE.get(finding.kind, ()) if e.split()[0] not in given]
        options.update(useful[:1])
    if options:
        yield f"To compare more, try {' '.join(sorted(options))}."
    names = {name for each in layouts for name in each.shown.acceptable}
    if names:
        yield f"If the finding is meant, accept it: --accept {','.join(sorted(names))}."


_RESUME_COLUMNS: tuple[Column[VerifiedResume], ...] = (
    Column("", lambda resumed: _mark_of(resumed.finding.passed), "name"),
    Column("ranks", lambda resumed: _ranks(*resumed.ranks), "name"),
    Column("first\ndifference", lambda resumed: _step(resumed.finding.step), "name"),
    Column("what was found", lambda resumed: ";\n".join(resumed.finding.reasons), "text"),
)


def _ranks(before: int, after: int) -> str:
    return str(before) if before == after else f"{before} → {after}"


def _show_resumed(resumed: VerifiedResume, *, as_json: bool) -> int:
    """Print the result of a resumed training, and return the exit code."""
    passed = resumed.finding.passed
    sentence = {
        True: "The resumed training continues as if it had never stopped.",
        False: "The resumed training is another one than without a stop.",
        None: "It is not shown how the resumed training continues.",
    }[passed]
    if as_json:
        print_json(fields_of(resumed))
    else:
        table = Table(columns=_RESUME_COLUMNS, items=(resumed,))
        plain_console().print(terminal_view(Section(table=table, sentences=[sentence])))
    return _CODES[passed]
