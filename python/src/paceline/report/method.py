"""The section that says how the figures of the page come about, with the constants of the code."""

from __future__ import annotations

from paceline.analysis.compare.result import Comparison
from paceline.analysis.statistics.fastest import TIE_MARGIN
from paceline.analysis.statistics.intervals import CONFIDENCE, WIDEST
from paceline.report.section import Section
from paceline.report.wording import NOT_KNOWN, NOT_MEASURED, share

_CONFIDENCE, _ERROR = share(CONFIDENCE), share(1 - CONFIDENCE)
_MEANINGS = {
    "samples/s": "Samples of all steps of a repeat after the warm-up over their total time, so "
    "stalls count. A step lasts from the end of the previous one to its own end on the slowest "
    "rank. The table shows the geometric mean over the repeats. The first step is timed from the "
    "launch command.",
    "Interval": f"A {_CONFIDENCE} confidence interval by Student's t. That of samples/s has the "
    "whole spread between repeats. With one repeat it covers the steps of that repeat only. An "
    f"interval that spans more than a factor of {WIDEST:g} is shown as “{NOT_KNOWN}”.",
    "Speedup": "Ratio of samples/s to that of the baseline. Its interval comes from the "
    "differences within repeats, so that slow drifts of the machine cancel.",
    "Efficiency": "Speedup over allocated cores, for configurations in the precision of the "
    "baseline.",
    "Not separated from the fastest": "All configurations are compared with the fastest at once. "
    f"At most {_ERROR} of runs call a configuration slower that is not. With one repeat there is "
    "no verdict.",
    "Tie": f"Shown to be within the margin of the fastest, {share(TIE_MARGIN)} unless the spec has "
    "another.",
    "Time": "Counted for each rank from the launch command to its exit; the phases add up to the "
    "wall time. Communication is the exposed part, after the rank's last gradient: until the "
    "slowest rank's last gradient it is waiting, then transfer.",
    "CPU, RAM and IOWait": "Those of the whole host, mean over the training, in percent of all its "
    "cores. Threads are those of the run, median over the training. Peak memory covers the whole "
    "trial, as proportional set size (PSS, shared memory counted once) where it was read, else as "
    "resident set size (RSS).",
    "Repeats": "Every repeat is a fresh process. The trials of a repeat run in a seeded random "
    f"order. {NOT_MEASURED} means not measured.",
}
_TARGET = (
    "Training time until the first evaluation that meets the target. A repeat that misses it is "
    "censored: it counts as slower than those that reach it, and the mean needs more than half of "
    "the repeats. Configurations are ranked by it, also those that are lossy on purpose."
)


def method_section(comparison: Comparison) -> Section:
    """Explain the figures; the time to a target only where there are evaluations."""
    meanings = dict(_MEANINGS)
    if any(row.metrics for row in comparison.rows):
        meanings["Time to target"] = _TARGET
    parts = [Section(title=term, sentences=(text,)) for term, text in meanings.items()]
    return Section(title="Method", anchor="method", parts=parts)
