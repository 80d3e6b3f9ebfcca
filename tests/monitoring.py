"""What dashboards and rules ask of Prometheus, read from their files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

VARIABLES = {"$__rate_interval": "1m", "$instance": ".*", "$model": ".*"}
"""Grafana's variables as the tests fill them in."""


def panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    """The panels without the rows' headings."""
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def panel_queries(dashboard: dict[str, Any]) -> list[str]:
    """Every query of every panel, as it is written."""
    return [target["expr"] for panel in panels(dashboard) for target in panel["targets"]]


def annotation_queries(dashboard: dict[str, Any]) -> list[str]:
    """The queries behind the marks on the time axis."""
    return [mark["expr"] for mark in dashboard.get("annotations", {}).get("list", []) if mark.get("expr")]


def filled(query: str) -> str:
    """The query as Grafana sends it when all instances are chosen."""
    for variable, value in VARIABLES.items():
        query = query.replace(variable, value)
    return query


def rules_of(path: Path) -> list[dict[str, Any]]:
    """The rules of a file, of all its groups."""
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    return [rule for group in content["groups"] for rule in group["rules"]]
