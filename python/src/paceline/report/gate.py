"""The judgement of a gate as a sentence and as a JUnit file."""

from __future__ import annotations

from collections.abc import Mapping
from xml.etree import ElementTree as ET

from paceline.analysis.between_runs.gate import Gate, Judged


def gate_sentences(gate: Gate, names: Mapping[str, str]) -> list[str]:
    """Say whether the later run passed, why not, and which slowdown the test would have found.

    names: short names of the configurations.
    """
    failed = [each for each in gate.judged if each.judgement != "passed"]
    count = f"{len(gate.judged)} configuration{'' if len(gate.judged) == 1 else 's'}"
    if not failed:
        allowed = f"more than {_percent(gate.limit)} slower than in the first run"
        lines = [f"Gate passed: of {count}, none is {allowed} (5 %, Holm)."]
    else:
        lines = [f"Gate failed for {len(failed)} of {count}:"]
        lines += [f"  {names[each.configuration]}: {reason(each, gate.limit)}" for each in failed]
    if gate.detectable is not None:
        lines.append(f"This test finds a slowdown of {_percent(gate.detectable)} in 80 % of cases.")
    return lines


def reason(judged: Judged, limit: float) -> str:
    """Say why one configuration did not pass."""
    if judged.judgement == "slower" and judged.ratio is not None:
        return (
            f"slower by more than {_percent(limit)}: {judged.ratio.median:.2f} of the speed, at "
            f"most {judged.ratio.high:.2f} (95 %)"
        )
    return f"{judged.judgement}: {judged.reason}"


def junit_text(gate: Gate, names: Mapping[str, str]) -> str:
    """Return a JUnit file with one test case for each configuration."""
    failed = sum(each.judgement != "passed" for each in gate.judged)
    counts = {"tests": str(len(gate.judged)), "failures": str(failed)}
    suites = ET.Element("testsuites", counts)
    suite = ET.SubElement(suites, "testsuite", {"name": "paceline compare", **counts})
    for each in gate.judged:
        name = _printable(names[each.configuration])
        case = ET.SubElement(suite, "testcase", {"classname": each.workload, "name": name})
        if each.judgement != "passed":
            text = _printable(reason(each, gate.limit))
            failure = {"type": each.judgement, "message": text}
            ET.SubElement(case, "failure", failure).text = text
    ET.indent(suites)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ET.tostring(suites, encoding="unicode")}\n'


def _printable(text: str) -> str:
    """Replace control characters, which XML does not allow."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %"
