"""Prometheus' configuration, rules and alerts, read by Prometheus' own tool and unit-tested with it."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.monitoring import rules_of

ROOT = Path(__file__).parent.parent
DIRECTORY = ROOT / "deploy/prometheus"


@pytest.fixture(scope="module")
def promtool() -> str:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is not installed (Debian's package prometheus)")
    return program


def run(*command: str | Path, standard_input: bytes | None = None) -> str:
    result = subprocess.run(command, input=standard_input, capture_output=True, timeout=60)
    output = (result.stdout + result.stderr).decode()
    assert result.returncode == 0, output
    return output


def test_the_configuration_is_valid_with_its_rules_and_keys(promtool: str, tmp_path: Path) -> None:
    for name in ("prometheus.yml", "rules.yml", "alerts.yml"):
        text = (DIRECTORY / name).read_text(encoding="utf-8").replace("/tmp/keys", str(tmp_path))
        (tmp_path / name).write_text(text, encoding="utf-8")
    for key in ("edge", "cloud"):
        (tmp_path / key).write_text("k", encoding="utf-8")

    output = run(promtool, "check", "config", tmp_path / "prometheus.yml")

    assert "2 rule files found" in output


def test_every_alert_fires_when_it_should_and_only_then(promtool: str) -> None:
    assert "SUCCESS" in run(promtool, "test", "rules", DIRECTORY / "tests/alerts.yml")


def test_every_alert_has_a_unit_test_that_sees_it_fire_and_one_that_sees_it_silent() -> None:
    tests = yaml.safe_load((DIRECTORY / "tests/alerts.yml").read_text(encoding="utf-8"))["tests"]
    asked = [one for test in tests for one in test["alert_rule_test"]]
    names = {rule["alert"] for rule in rules_of(DIRECTORY / "alerts.yml")}

    assert {one["alertname"] for one in asked if one.get("exp_alerts")} == names
    assert {one["alertname"] for one in asked if not one.get("exp_alerts")} == names


def test_every_alert_has_its_place_in_the_runbook() -> None:
    runbook = (ROOT / "docs/runbook.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (\w+)$", runbook, re.MULTILINE)
    alerts = rules_of(DIRECTORY / "alerts.yml")

    assert headings == [alert["alert"] for alert in alerts]
    for alert in alerts:
        assert alert["annotations"]["runbook"] == f"docs/runbook.md#{alert['alert'].lower()}"
        assert alert["labels"]["severity"] in ("critical", "warning")
