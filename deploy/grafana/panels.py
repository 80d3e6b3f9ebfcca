"""The few shapes of panel that the dashboards are made of, on top of Grafana's SDK."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from grafana_foundation_sdk.builders import common, dashboard, heatmap, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import common as common_model
from grafana_foundation_sdk.models import dashboard as dashboard_model
from grafana_foundation_sdk.models import heatmap as heatmap_model
from grafana_foundation_sdk.models import prometheus as prometheus_model

DATASOURCE = dashboard_model.DataSourceRef(type_val="prometheus", uid="${datasource}")
HEIGHT = 8
STAT_HEIGHT = 4
FULL_WIDTH = 24

Panel = timeseries.Panel | stat.Panel | heatmap.Panel


@dataclass(frozen=True)
class Series:
    """A query and what its lines are called."""

    query: str
    legend: str


@dataclass(frozen=True)
class Section:
    """A row of the dashboard and the panels under it."""

    title: str
    panels: Sequence[Panel]


def rate(metric: str, by: str, labels: str = "") -> str:
    """The sum of a counter's rates by some labels."""
    return f'sum by ({by}) (rate({metric}{{instance=~"$instance"{labels}}}[$__rate_interval]))'


def quantile(level: float, histogram: str, by: str = "instance") -> str:
    """A quantile of a histogram; `histogram` without its `_bucket`."""
    return f"histogram_quantile({level}, {rate(f'{histogram}_bucket', f'{by}, le')})"


def quantiles(histogram: str) -> tuple[Series, ...]:
    """The median, and what one request in 20 and in 100 sees."""
    return tuple(
        Series(quantile(level, histogram), f"{{{{instance}}}} p{level * 100:.0f}") for level in (0.5, 0.95, 0.99)
    )


def gauge(metric: str) -> str:
    """A gauge of the chosen instances."""
    return f'{metric}{{instance=~"$instance"}}'


def lines(title: str, description: str, unit: str, *series: Series, width: int = 8, stacked: bool = False) -> Panel:
    """Lines over time; stacked where they add up to something."""
    panel = (
        timeseries.Panel()
        .title(title)
        .description(description)
        .unit(unit)
        .datasource(DATASOURCE)
        .height(HEIGHT)
        .span(width)
        .min(0)
        .fill_opacity(30 if stacked else 8)
        .show_points(common_model.VisibilityMode.NEVER)
        .legend(
            common.VizLegendOptions()
            .display_mode(common_model.LegendDisplayMode.TABLE)
            .placement(common_model.LegendPlacement.BOTTOM)
            .show_legend(True)
            .calcs(["lastNotNull", "max"])
        )
        .tooltip(common.VizTooltipOptions().mode(common_model.TooltipDisplayMode.MULTI))
    )
    if stacked:
        panel = panel.stacking(common.StackingConfig().mode(common_model.StackingMode.NORMAL))
    for letter, one in zip("ABCDEFGH", series, strict=False):
        panel = panel.with_target(_target(one, letter))
    return panel


def value(title: str, description: str, unit: str, query: str, legend: str = "{{instance}}", width: int = 3) -> Panel:
    """The latest value, with its course behind it."""
    return (
        stat.Panel()
        .title(title)
        .description(description)
        .unit(unit)
        .datasource(DATASOURCE)
        .height(STAT_HEIGHT)
        .span(width)
        .graph_mode(common_model.BigValueGraphMode.AREA)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .with_target(_target(Series(query, legend), "A"))
    )


def heat(title: str, description: str, histogram: str, unit: str = "short", width: int = 8) -> Panel:
    """How a histogram's buckets fill over time; `histogram` without its `_bucket`."""
    query = rate(f"{histogram}_bucket", "le")
    target = _target(Series(query, "{{le}}"), "A").format(prometheus_model.PromQueryFormat.HEATMAP)
    return (
        heatmap.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .height(HEIGHT)
        .span(width)
        .calculate(False)
        .cell_gap(1)
        .hide_y_histogram()
        .show_tooltip()
        .show_legend()
        .y_axis(heatmap.YAxisConfig().unit(unit))
        .color(
            heatmap.HeatmapColorOptions()
            .mode(heatmap_model.HeatmapColorMode.SCHEME)
            .scheme("Oranges")
            .steps(64)
            .exponent(0.5)
        )
        .with_target(target)
    )


class Marks(Builder[dashboard_model.AnnotationQuery]):
    """Marks on every panel's time axis wherever the query gives something."""

    def __init__(self, name: str, query: str, title: str, color: str) -> None:
        self._query = _TitledQuery(name=name, datasource=DATASOURCE, icon_color=color, expr=query)
        self._query.title = title

    def build(self) -> dashboard_model.AnnotationQuery:
        """The query with its title."""
        return self._query


class _TitledQuery(dashboard_model.AnnotationQuery):
    """The SDK's own has no place for the marks' text."""

    title = ""

    def to_json(self) -> dict[str, object]:
        return {**super().to_json(), "titleFormat": self.title, "step": "15s"}


def board(
    uid: str,
    title: str,
    description: str,
    variables: Sequence[dashboard.QueryVariable],
    sections: Sequence[Section],
    marks: Sequence[Marks] = (),
) -> dashboard_model.Dashboard:
    """A whole dashboard. The data source is always its first variable."""
    made = (
        dashboard.Dashboard(title)
        .uid(uid)
        .description(description)
        .tags(["souschef"])
        .readonly()
        .refresh("30s")
        .time("now-1h", "now")
        .timezone("browser")
        .tooltip(dashboard_model.DashboardCursorSync.CROSSHAIR)
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
        .link(
            dashboard.DashboardLink("Souschef")
            .type(dashboard_model.DashboardLinkType.DASHBOARDS)
            .tags(["souschef"])
            .as_dropdown(True)
            .keep_time(True)
            .include_vars(True)
        )
    )
    for variable in variables:
        made = made.with_variable(variable)
    for mark in marks:
        made = made.annotation(mark)
    number = 0
    for section in sections:
        number += 1
        made = made.with_row(dashboard.Row(section.title).id(number))
        for panel in section.panels:
            number += 1
            made = made.with_panel(panel.id(number))
    return made.build()


def choice(name: str, label: str, query: str) -> dashboard.QueryVariable:
    """A variable that picks some of a label's values, at first all of them."""
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .datasource(DATASOURCE)
        .query(query)
        .refresh(dashboard_model.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(dashboard_model.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(dashboard_model.VariableOption(selected=True, text="All", value="$__all"))
    )


def _target(series: Series, letter: str) -> prometheus.Dataquery:
    return (
        prometheus.Dataquery()
        .ref_id(letter)
        .datasource(DATASOURCE)
        .expr(series.query)
        .legend_format(series.legend)
        .range()
    )
