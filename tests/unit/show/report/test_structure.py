"""The page has its parts in order, can be read without a mouse and by a screen reader."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest
from tests.support.pages import Element, Page
from tests.unit.analysis import fabricate

from paceline.analysis.compare.run import compare_run
from paceline.show.report.columns import comparison_table
from paceline.show.report.document import render
from paceline.show.report.section import Detail

_MIB = 2**20
# AA of the Web Content Accessibility Guidelines 2.2, section 1.4.3, for texts of any size
_LEAST_CONTRAST = 4.5
_TEXTS = ("--ink", "--soft", "--accent", "--good", "--bad")


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> str:
    ways = [fabricate.SEQUENTIAL, fabricate.INTRAOP, fabricate.MPI, fabricate.SPARK]
    folder: Path = tmp_path_factory.mktemp("structure")
    return render(compare_run(fabricate.make_run(folder / "run", ways, repeats=3, jitter=0.01)))


@pytest.fixture(scope="module")
def page(html: str) -> Page:
    return Page(html)


def _place(page: Page, element: Element) -> int:
    return page.in_order.index(element)


def _chart(page: Page, title: str) -> Element:
    charts = [e for e in page.in_order if e.has_class("chart")]
    return next(e for e in charts if (e.attributes["aria-label"] or "").startswith(title))


def test_verdict_chart_table_and_causes_come_in_this_order(page: Page) -> None:
    headline = next(e for e in page.in_order if e.has_class("headline"))
    causes = next(e for e in page.in_order if e.attributes.get("id") == "causes")
    parts = [headline, _chart(page, "Chart: Speedup"), page.root.every("table")[0], causes]
    places = [_place(page, each) for each in parts]
    assert places == sorted(places)
    assert not any(each.within("details") for each in parts)


def test_commands_in_sentences_are_code(tmp_path: Path) -> None:
    run = fabricate.make_run(tmp_path, [fabricate.SEQUENTIAL, fabricate.MPI])
    page = Page(render(compare_run(run)))
    headline = next(e for e in page.in_order if e.has_class("headline"))
    assert "`" not in headline.text
    assert [each.text for each in headline.every("code")] == [
        "paceline run --resume RUN_DIR --repeats 5"
    ]


def test_everything_after_the_causes_is_folded(page: Page) -> None:
    sections = page.root.every("h2")
    open_ones = [e.attributes["id"] for e in sections if not e.within("details")]
    assert open_ones == ["verdict", "speed", "causes"]
    assert len(sections) > len(open_ones) + 5
    assert not any("open" in e.attributes for e in page.root.every("details"))
    assert all(e.children[0].tag == "summary" for e in page.root.every("details"))


def test_columns_that_need_the_button_are_those_of_the_widest_detail(
    page: Page, tmp_path: Path
) -> None:
    table = page.root.every("table")[0]
    headings = table.every("thead")[0].every("th")
    run = fabricate.make_run(tmp_path, [fabricate.SEQUENTIAL, fabricate.MPI], repeats=2)
    columns = comparison_table(compare_run(run), "tiny", Detail.PAGE).columns
    expected = [column.detail == Detail.PAGE for column in columns]
    assert [heading.has_class("more") for heading in headings] == expected
    for line in table.every("tbody")[0].every("tr"):
        assert [cell.has_class("more") for cell in line.children] == expected
    button = page.root.every("button")[0]
    assert button.text == f"Show all {len(headings)} columns"
    assert button.attributes["aria-expanded"] == "false"
    assert _place(page, button) < _place(page, table)


def test_cells_of_every_table_have_headings(page: Page) -> None:
    for table in page.root.every("table"):
        assert table.every("caption")[0].text
        assert all(
            e.attributes["scope"] == "col" for h in table.every("thead") for e in h.every("th")
        )
        for line in table.every("tbody")[0].every("tr"):
            assert line.every("th")
            assert all(e.attributes["scope"] == "row" for e in line.every("th"))
            if table.every("thead"):
                assert all(e.attributes["data-label"] for e in line.every("td"))


def test_a_row_of_the_ranking_is_named_by_its_configuration(page: Page) -> None:
    lines = page.root.every("table")[0].every("tbody")[0].every("tr")
    names = [[cell.text for cell in line.every("th")] for line in lines]
    assert ["processes", "2\u00d71", "mpi", "mpi"] in names
    assert len({tuple(name) for name in names}) == len(names) == 4


def test_headings_skip_no_level(page: Page) -> None:
    levels = [int(e.tag[1]) for e in page.in_order if re.fullmatch("h[1-6]", e.tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))


def test_charts_and_controls_have_names(page: Page) -> None:
    for element in page.in_order:
        if element.has_class("chart"):
            assert element.attributes["role"] == "img"
            assert len(element.attributes["aria-label"] or "") > len("Chart: .")
        if element.tag in {"button", "summary", "a"}:
            assert element.text
        if element.tag == "select":
            assert element.within("label")


def test_ids_are_unique_and_links_reach_them(page: Page) -> None:
    ids = [e.attributes["id"] for e in page.in_order if "id" in e.attributes]
    assert len(set(ids)) == len(ids)
    links = {(e.attributes["href"] or "").removeprefix("#") for e in page.root.every("a")}
    assert links <= set(ids)


def _contrast(first: str, second: str) -> float:
    lighter, darker = sorted((_luminance(first), _luminance(second)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def _luminance(colour: str) -> float:
    """Return the relative luminance of `#rrggbb` or `#rgb` (WCAG 2.2)."""
    digits = colour.removeprefix("#")
    pairs = [2 * d for d in digits] if len(digits) == 3 else re.findall("..", digits)
    linear = []
    for pair in pairs:
        value = int(pair, 16) / 255
        linear.append(value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4)
    red, green, blue = linear
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_contrast_is_that_of_black_on_white() -> None:
    assert _contrast("#000", "#ffffff") == pytest.approx(21)
    assert _contrast("#777777", "#fff") == pytest.approx(4.48, abs=0.01)


def test_texts_have_enough_contrast_in_both_colours_and_in_print(html: str) -> None:
    modes = re.findall(r":root \{([^}]*)\}", html)
    assert len(modes) == 3
    for mode in modes:
        colours = dict(re.findall(r"(--[\w-]+): (#\w+)", mode))
        pairs = [(text, page) for text in _TEXTS for page in ("--page", "--panel")]
        pairs += [("--ink", "--warn-page")]
        low = {
            pair: contrast
            for pair in pairs
            if (contrast := _contrast(colours[pair[0]], colours[pair[1]])) < _LEAST_CONTRAST
        }
        assert low == {}


def test_plotly_is_compressed(html: str) -> None:
    packed = re.search(r'<script type="application/gzip" id="plotly">([^<]*)</script>', html)
    assert packed is not None
    assert len(packed[1]) < 2.2 * _MIB
