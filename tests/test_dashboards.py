"""The dashboards: generated, checked in, complete. That their queries find data is tested with a real Prometheus."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import Metric

from cloud_service.metrics import CloudMetrics
from deploy.grafana.generate import DIRECTORY, rendered
from edge_agent.metrics import EdgeMetrics
from tests.monitoring import annotation_queries, panel_queries, panels

ROOT = Path(__file__).parent.parent
NAMES = ("cloud", "device", "overview", "speculation")


def load(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((DIRECTORY / f"{name}.json").read_text(encoding="utf-8"))
    return content


def test_the_files_are_what_the_code_makes() -> None:
    stored = {path.name: path.read_text(encoding="utf-8") for path in DIRECTORY.iterdir()}

    assert stored == rendered()


def families() -> list[Metric]:
    """What both services export."""
    return [*EdgeMetrics().registry.collect(), *CloudMetrics(lambda: 0).registry.collect()]


@pytest.mark.parametrize("name", NAMES)
def test_every_panel_has_an_id_a_text_and_a_query_with_a_legend(name: str) -> None:
    dashboard = load(name)
    found = panels(dashboard)

    assert found
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    for panel in found:
        assert panel["title"]
        assert panel["description"].endswith(".")
        assert panel["targets"]
        for target in panel["targets"]:
            assert target["expr"]
            assert target["legendFormat"]


@pytest.mark.parametrize("name", NAMES)
def test_panels_lie_side_by_side_and_never_on_each_other(name: str) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in load(name)["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells


@pytest.mark.parametrize("name", NAMES)
def test_the_data_source_is_a_variable(name: str) -> None:
    dashboard = load(name)
    variables = [variable["name"] for variable in dashboard["templating"]["list"]]

    assert variables[0] == "datasource"
    assert "instance" in variables
    assert name == "cloud" or "model" in variables
    sources = [panel["datasource"]["uid"] for panel in panels(dashboard)]
    assert set(sources) == {"${datasource}"}


def test_every_metric_is_on_a_dashboard_or_in_a_rule() -> None:
    shown = "".join(path.read_text(encoding="utf-8") for path in DIRECTORY.iterdir())
    ruled = (ROOT / "deploy/prometheus/rules.yml").read_text(encoding="utf-8")

    assert not {family.name for family in families() if family.name not in shown + ruled}


def test_the_device_dashboard_marks_decisions_and_handoffs() -> None:
    marks = annotation_queries(load("device"))

    assert any("decisions_total" in query for query in marks)
    assert any("handoffs_total" in query for query in marks)


def test_queries_name_only_metrics_that_exist_or_are_recorded() -> None:
    rules = yaml.safe_load((ROOT / "deploy/prometheus/rules.yml").read_text(encoding="utf-8"))
    recorded = {rule["record"] for group in rules["groups"] for rule in group["rules"]}
    exported = {sample.name for family in families() for sample in family.samples} | {one.name for one in families()}
    for name in NAMES:
        for query in panel_queries(load(name)):
            assert set(re.findall(r"souschef:[a-z0-9_:]+", query)) <= recorded
            for metric in re.findall(r"souschef_(?:edge|cloud)_[a-z0-9_]+", query):
                stem = re.sub(r"_(total|bucket|sum|count|info)$", "", metric)
                assert {metric, stem} & exported, metric
