"""The choice between all-reduce and factor exchange on the page."""

from __future__ import annotations

import json

import pytest

from paceline.analysis.compare import compare_run
from paceline.report.document import render
from paceline.report.factors import sufficient_factors
from paceline.report.wording import NOT_MEASURED

LAYERS = [
    {
        "layer": "classifier.1",
        "all_reduce": {"sent_bytes": 151.0e6, "seconds": 1.25},
        "factors": {"sent_bytes": 1.7e6, "seconds": 0.0625},
        "sends_factors": True,
    },
    {
        "layer": "classifier.6",
        "all_reduce": {"sent_bytes": 49e3, "seconds": 0.0005},
        "factors": {"sent_bytes": 520e3, "seconds": 0.005},
        "sends_factors": False,
    },
]
SPEEDS = {
    "latency_s": 0.0002,
    "all_reduce_bytes_per_s": 120e6,
    "all_gather_bytes_per_s": 121e6,
    "product_flop_per_s": 50e9,
}


@pytest.fixture
def page_with(fabricate, tmp_path):
    """A comparison in which the MPI trial recorded this choice."""

    def make(choice):
        run = fabricate.make_run(tmp_path, [fabricate.SEQUENTIAL, fabricate.MPI])
        for name, files in run.trials():
            if ".mpi.mpi." in name:
                result = json.loads(files.result.read_text())
                result["communication"]["sufficient_factors"] = choice
                files.result.write_text(json.dumps(result))
        return compare_run(run)

    return make


def test_both_costs_of_each_layer_are_shown(page_with):
    comparison = page_with({"setting": "auto", "speeds": SPEEDS, "reason": None, "layers": LAYERS})
    (part,) = sufficient_factors(comparison)
    assert part["lines"] == [
        {
            "layer": "classifier.1",
            "chosen": "factors",
            "all_reduce": "151",
            "all_reduce_s": "1250",
            "factors": "1.70",
            "factors_s": "62.5",
        },
        {
            "layer": "classifier.6",
            "chosen": "all-reduce",
            "all_reduce": "0.0490",
            "all_reduce_s": "0.500",
            "factors": "0.520",
            "factors_s": "5.00",
        },
    ]
    assert part["sentence"] == (
        "Setting: auto. Measured before the training: latency 0.2 ms, all-reduce 120 MB/s, "
        "all-gather 121 MB/s, products 50.0 Gflop/s."
    )
    page = render(comparison)
    assert "classifier.1" in page[page.index('id="factors"') :]


def test_missing_speeds_and_the_reason_are_stated(page_with):
    layer = {
        **LAYERS[1],
        "all_reduce": {"sent_bytes": 49e3, "seconds": None},
        "factors": {"sent_bytes": 520e3, "seconds": None},
    }
    choice = {"setting": "auto", "speeds": None, "reason": "processors differ", "layers": [layer]}
    (part,) = sufficient_factors(page_with(choice))
    assert part["sentence"] == (
        "Setting: auto. No layer sends factors: processors differ. Speeds were not measured, "
        "because factors save no bytes."
    )
    assert part["lines"][0]["all_reduce_s"] == NOT_MEASURED


def test_setting_that_excludes_factors_is_the_reason_for_missing_speeds(page_with):
    choice = {"setting": "never", "speeds": None, "reason": None, "layers": [LAYERS[1]]}
    (part,) = sufficient_factors(page_with(choice))
    assert part["sentence"] == (
        "Setting: never. Speeds were not measured, because the setting excludes factors."
    )


def test_page_without_a_choice_has_no_such_section(page_with):
    assert 'id="factors"' not in render(page_with({}))
