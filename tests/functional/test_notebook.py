"""The example notebook runs from start to end, and shows the results of a real run."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from unittest import mock

import nbclient
import nbformat
import pytest
from traitlets.config import Config

import paceline

pytestmark = [pytest.mark.functional, pytest.mark.timeout(400)]

NOTEBOOK = Path(__file__).parents[2] / "examples/notebook/compare.ipynb"
LIMIT_S = 300  # for the start of the kernel, and for one cell


@pytest.fixture(scope="module")
def outputs(cache, tiny_dataset, tmp_path_factory):
    """Return the outputs of the cells by their ids, and the folder in which they ran.

    The notebook uses the data set of `tiny_dataset`, which is in the cache.
    """
    folder = tmp_path_factory.mktemp("notebook")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = nbclient.NotebookClient(
        notebook,
        timeout=LIMIT_S,
        startup_timeout=LIMIT_S,
        # no TCP port; the sockets are in the current directory
        config=Config({"KernelManager": {"transport": "ipc"}}),
    )
    environment = {"PACELINE_CACHE": str(cache)}
    with contextlib.chdir(folder), mock.patch.dict("os.environ", environment):
        client.execute()
    return {cell["id"]: cell.get("outputs", []) for cell in notebook.cells}, folder


def _result(outputs, cell):
    kinds = ("execute_result", "display_data")
    (result,) = [each for each in outputs[cell] if each["output_type"] in kinds]
    return result["data"]


def test_run_shows_lines_of_progress_and_the_table(outputs):
    cells, folder = outputs
    lines = "".join(each["text"] for each in cells["run"] if each.get("name") == "stderr")
    assert len(re.findall(r"^\[\d/3\] tiny\.local\.\S+  ok  [\d.]+ s$", lines, re.MULTILINE)) == 3
    html = _result(cells, "run")["text/html"]
    assert html.startswith("<pre")
    assert "intraop" in html
    (run_dir,) = (folder / "runs").iterdir()
    verdict = paceline.load(run_dir).verdict
    assert _result(cells, "verdict")["text/plain"] == repr(verdict.sentence)


def test_frames_and_figures_are_shown(outputs):
    cells, folder = outputs
    assert "speedup.estimate" in _result(cells, "rows")["text/plain"]
    figure = _result(cells, "figures")["application/vnd.plotly.v1+json"]
    assert figure["layout"]["title"]["text"] == "Speedup, tiny"
    assert len(figure["data"][0]["x"]) == 3
    assert (folder / "report.html").stat().st_size > 1_000_000  # with Plotly's library
    assert not [e for cell in cells.values() for e in cell if e["output_type"] == "error"]
