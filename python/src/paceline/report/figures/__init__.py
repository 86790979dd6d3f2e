"""The report's figures, as Plotly figures in JSON; the only package that knows Plotly."""

from paceline.report.figures.bars import (
    communication_chart,
    rank_time_chart,
    stage_chart,
    step_time_chart,
    waterfall_chart,
)
from paceline.report.figures.charts import Chart, colours, first_repeats, plotly_js
from paceline.report.figures.evaluation import metric_chart
from paceline.report.figures.hosts import resource_charts, shades, telemetry_charts
from paceline.report.figures.speed import loss_chart, speedup_chart, step_distribution_chart
from paceline.report.figures.strategies import local_global_chart, local_use_chart

__all__ = [
    "Chart",
    "colours",
    "communication_chart",
    "first_repeats",
    "local_global_chart",
    "local_use_chart",
    "loss_chart",
    "metric_chart",
    "plotly_js",
    "rank_time_chart",
    "resource_charts",
    "shades",
    "speedup_chart",
    "stage_chart",
    "step_distribution_chart",
    "step_time_chart",
    "telemetry_charts",
    "waterfall_chart",
]
