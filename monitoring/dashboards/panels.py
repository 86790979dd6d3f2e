"""Builders of panels, variables, links and annotations, the same on all dashboards.

Every panel has a unit, a description, thresholds, and a legend if it has several series.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from grafana_foundation_sdk.builders import bargauge, common, stat, table, timeseries
from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as styles
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.prometheus import PromQueryFormat
from monitoring.dashboards import queries

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SOURCE = models.DataSourceRef(type_val="prometheus", uid="$datasource")
UIDS = {"Run": "paceline-run", "Compare": "paceline-compare", "Cluster": "paceline-cluster"}
_SHARE = "percentunit"  # Grafana's name
_PERCENT_DECIMALS = 1  # of a single value; Grafana would show thousandths of a percent
_NUMBER_PX = 90  # smallest width of a column of numbers
_WIDTHS_PX = {"trial": 360}  # of columns by label; Grafana makes the others equal
GREEN, ORANGE, RED, BLUE, PURPLE = "green", "orange", "red", "blue", "purple"


@dataclass(frozen=True, slots=True)
class Query:
    expr: str
    legend: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Look:
    """Properties of all kinds of panels: the options of `lines`, `figure`, `bars` and tables.

    unit: by default that of the metric in the first query. share: of something, from 0 to 1.
    steps: colours from a value on.
    """

    title: str
    description: str
    unit: str
    share: bool = False
    steps: tuple[tuple[float, str], ...] = ()
    first: str = GREEN  # below the first of `steps`
    width: int = 8
    height: int = 8
    low: float | None = 0
    high: float | None = None
    decimals: int | None = None
    missing: str = "no data"  # text if no host has the values


Panel = timeseries.Panel | stat.Panel | bargauge.Panel | table.Panel


def _look(title: str, description: str, expr: str, **options: Any) -> _Look:
    """Return the properties of a panel whose first query is `expr`."""
    if options.get("share"):
        options = {"unit": _SHARE, "high": 1, **options, "low": 0}
    if "unit" not in options:
        options["unit"] = queries.unit_of(expr)
    return _Look(title=title, description=description, **options)


def _dress(panel: Panel, look: _Look) -> None:
    steps = [models.Threshold(value=None, color=look.first)]
    steps += [models.Threshold(value=value, color=color) for value, color in look.steps]
    absolute = builders.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE)
    panel.title(look.title).description(look.description).datasource(SOURCE).unit(look.unit)
    panel.span(look.width).height(look.height).thresholds(absolute.steps(steps))
    # the shortest scrape interval that Paceline configures
    panel.interval("1s").no_value(look.missing)
    if look.low is not None:
        panel.min(look.low)
    if look.high is not None:
        panel.max(look.high)
    if look.decimals is not None:
        panel.decimals(look.decimals)


def _rounded(look: _Look) -> _Look:
    """Show a share with one decimal unless another number of decimals is given."""
    plain = look.unit != _SHARE or look.decimals is not None
    return look if plain else replace(look, decimals=_PERCENT_DECIMALS)


def _target(query: Query, number: int, *, instant: bool) -> Dataquery:
    target = Dataquery().expr(query.expr).legend_format(query.legend).ref_id(chr(ord("A") + number))
    target.datasource(SOURCE)
    return target.instant() if instant else target.range()


def lines(
    title: str, description: str, *asked: Query, stacked: bool = False, **options: Any
) -> timeseries.Panel:
    """Draw values over time; `stacked` if they add up to a whole. options: of `_Look`."""
    look = _look(title, description, asked[0].expr, **options)
    panel = timeseries.Panel()
    _dress(panel, look)
    for number, query in enumerate(asked):
        panel.with_target(_target(query, number, instant=False))
    panel.line_width(1).fill_opacity(40 if stacked else 8).show_points(styles.VisibilityMode.NEVER)
    panel.line_interpolation(styles.LineInterpolation.LINEAR).span_nulls(False)
    if stacked:
        panel.stacking(common.StackingConfig().mode(styles.StackingMode.NORMAL).group("A"))
    if look.steps:
        dashed = styles.GraphTresholdsStyleMode.DASHED
        panel.thresholds_style(common.GraphThresholdsStyleConfig().mode(dashed))
    legend = common.VizLegendOptions().display_mode(styles.LegendDisplayMode.TABLE)
    legend.placement(styles.LegendPlacement.BOTTOM).show_legend(True).calcs(["mean", "max"])
    tooltip = common.VizTooltipOptions().mode(styles.TooltipDisplayMode.MULTI)
    return panel.legend(legend).tooltip(tooltip.sort(styles.SortOrder.DESCENDING))


def figure(title: str, description: str, query: Query, **options: Any) -> stat.Panel:
    """Show the current value and its course. options: of `_Look`."""
    panel = stat.Panel()
    options = {"low": None, **options}
    _dress(panel, _rounded(_look(title, description, query.expr, **options)))
    panel.with_target(_target(query, 0, instant=False))
    panel.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).values(False))
    return panel.color_mode(styles.BigValueColorMode.VALUE).graph_mode(
        styles.BigValueGraphMode.AREA
    )


def bars(title: str, description: str, *asked: Query, **options: Any) -> bargauge.Panel:
    """Draw a bar for each series, over the whole time range. options: of `_Look`."""
    panel = bargauge.Panel()
    _dress(panel, _rounded(_look(title, description, asked[0].expr, **options)))
    for number, query in enumerate(asked):
        panel.with_target(_target(query, number, instant=True))
    panel.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).values(False))
    panel.orientation(styles.VizOrientation.HORIZONTAL)
    return panel.display_mode(styles.BarGaugeDisplayMode.BASIC)


@dataclass(frozen=True, slots=True)
class Column:
    """Column of a table: the value of a query, with name and unit."""

    name: str
    expr: str
    unit: str


def facts_table(
    title: str,
    description: str,
    keys: Mapping[str, str],
    columns: Sequence[Column],
    hidden: Sequence[str] = (),
    **options: Any,
) -> table.Panel:
    """Show a row for each set of labels that the columns' queries share.

    keys: label to heading. hidden: labels that have no column. options: of `_Look`.
    """
    panel = table.Panel()
    _dress(panel, _Look(title=title, description=description, unit="short", low=None, **options))
    for number, column in enumerate(columns):
        target = _target(Query(column.expr, column.name), number, instant=True)
        panel.with_target(target.format(PromQueryFormat.TABLE))
    values = [f"Value #{chr(ord('A') + n)}" if len(columns) > 1 else "Value" for n in range(30)]
    names = dict(keys) | {values[n]: column.name for n, column in enumerate(columns)}
    panel.with_transformation(models.DataTransformerConfig(id_val="merge", options={}))
    panel.with_transformation(
        models.DataTransformerConfig(
            id_val="organize",
            options={
                "excludeByName": dict.fromkeys(("Time", *hidden), True),
                "indexByName": {name: place for place, name in enumerate(names)},
                "renameByName": names,
            },
        )
    )
    for column in columns:
        settings: dict[str, object] = {"unit": column.unit, "custom.minWidth": _NUMBER_PX}
        if column.unit == _SHARE:
            settings["decimals"] = _PERCENT_DECIMALS
        panel.override_by_name(
            column.name,
            [models.DynamicConfigValue(id_val=name, value=to) for name, to in settings.items()],
        )
    for label, width_px in _WIDTHS_PX.items():
        if label in keys:
            wide = models.DynamicConfigValue(id_val="custom.width", value=width_px)
            panel.override_by_name(keys[label], [wide])
    return panel


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    title: str
    panels: tuple[Panel, ...]
    collapsed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """One dashboard.

    one_run: it shows a single run at a time. epochs: mark them; with many trials, the marks would
    hide the curves.
    """

    title: str
    description: str
    rows: tuple[Row, ...]
    one_run: bool
    epochs: bool = True
    refresh: str = "5s"
    since: str = "now-15m"

    def to_json(self) -> str:
        """Return the dashboard in Grafana's classic schema; equal dashboards give equal text."""
        built = builders.Dashboard(f"Paceline · {self.title}").uid(UIDS[self.title])
        built.description(self.description).tags(["paceline"]).readonly()
        built.refresh(self.refresh).time(self.since, "now").timezone("browser")
        built.tooltip(models.DashboardCursorSync.CROSSHAIR)
        for variable in _variables(one_run=self.one_run):
            built.with_variable(variable)
        for other, uid in UIDS.items():
            if other != self.title:
                built.link(_link(other, uid))
        for row in self.rows:
            _add_row(built, row)
        document: dict[str, Any] = json.loads(json.dumps(built.build(), cls=JSONEncoder))
        marks = [_annotation(*each) for each in _ANNOTATIONS]
        for mark in marks:
            mark["enable"] = self.epochs or mark["name"] != "Epoch"
        document["annotations"] = {"list": marks}
        for number, panel in enumerate(_panels(document), start=1):
            panel["id"] = number
        return json.dumps(document, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def _add_row(built: builders.Dashboard, row: Row) -> None:
    head = builders.Row(row.title).collapsed(row.collapsed)
    if row.collapsed:  # Grafana stores the panels of a collapsed row in the row
        for panel in row.panels:
            head.with_panel(panel)
        built.with_row(head)
        return
    built.with_row(head)
    for panel in row.panels:
        built.with_panel(panel)


def _panels(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    found = []
    for panel in document["panels"]:
        found += [panel, *panel.get("panels", [])]
    return found


def _variables(
    *, one_run: bool
) -> tuple[builders.DatasourceVariable | builders.QueryVariable, ...]:
    source = builders.DatasourceVariable("datasource").label("Data source").type("prometheus")
    run = _choice("run", "Run", "label_values(paceline_run_info, run)")
    host = _choice("host", "Host", 'label_values(paceline_run_info{run=~"$run"}, host)')
    rank = _choice("rank", "Rank", 'label_values(paceline_training_steps_total{run=~"$run"}, rank)')
    if not one_run:
        run.multi(True).include_all(True).all_value(".*").current(_all())
    for variable in (host, rank):
        variable.multi(True).include_all(True).all_value(".*").current(_all())
    return source, run, host, rank


def _all() -> models.VariableOption:
    return models.VariableOption(selected=True, text="All", value="$__all")


def _choice(name: str, label: str, query: str) -> builders.QueryVariable:
    # sorted as numbers, so that rank 10 follows rank 9
    order = (
        models.VariableSort.NUMERICAL_ASC
        if name == "rank"
        else models.VariableSort.ALPHABETICAL_ASC
    )
    variable = builders.QueryVariable(name).label(label).datasource(SOURCE)
    variable.query({"query": query, "refId": f"variable-{name}"})
    variable.refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
    return variable.sort(order)


def _link(title: str, uid: str) -> builders.DashboardLink:
    link = builders.DashboardLink(title).type(models.DashboardLinkType.LINK).icon("dashboard")
    return link.url(f"/d/{uid}").include_vars(True).keep_time(True).tooltip(f"To {title}")


_INFO = f"count by (run, trial, launcher, local_strategy) (paceline_run_info{{{queries.RUN}}} == 1)"
_EPOCH = (
    "count_values by (run) "
    f'("epoch", max by (run) (paceline_training_epoch{{{queries.RUN}}} OFFSET))'
)
_ANNOTATIONS = (
    (
        "Trial start",
        f"{_INFO} unless {_INFO.replace('} ==', '} offset 5s ==')}",
        BLUE,
        "{{trial}}",
        "{{launcher}} · {{local_strategy}}",
    ),
    (
        "Epoch",
        f"{_EPOCH.replace(' OFFSET', '')} unless {_EPOCH.replace('OFFSET', 'offset 5s')}",
        PURPLE,
        "epoch {{epoch}}",
        "{{run}}",
    ),
    (
        "Failure",
        f"max by (run, host, rank) (paceline_rank_failed{{{queries.RUN}}}) == 1",
        RED,
        "rank {{rank}} failed",
        "{{run}} on {{host}}: see its log.txt",
    ),
)


def _annotation(name: str, expr: str, color: str, title: str, text: str) -> dict[str, Any]:
    """Return an annotation for Grafana's Prometheus data source; the SDK has no type for it."""
    return {
        "name": name,
        "datasource": {"type": "prometheus", "uid": "$datasource"},
        "enable": True,
        "hide": False,
        "iconColor": color,
        "expr": expr,
        "step": "1s",
        "titleFormat": title,
        "textFormat": text,
        "tagKeys": "run",
    }
