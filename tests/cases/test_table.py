"""The table of known failures: complete, and as the tests say."""

from __future__ import annotations

from pathlib import Path

from tests.cases.places import CLOUD, DEVICE
from tests.cases.table import CASES, cases, render

ROOT = Path(__file__).parents[2]


def test_every_case_has_a_test_and_says_what_it_is_about() -> None:
    found = cases()
    assert set(found) == {f"{section}{number}" for section, numbers in CASES.items() for number in numbers}
    for case in found.values():
        assert len(case.elsewhere) > 40, case.name
        assert len(case.here) > 20, case.name


def test_cases_of_speculation_run_in_both_places() -> None:
    text = (Path(__file__).parent / "test_a_speculation.py").read_text()
    for number in CASES["A"]:
        tests = [part for part in text.split("\n\n\n") if f"def test_A{number}_" in part]
        both = any("@both_places" in test or "place: Place" in test or "(CLOUD, " in test for test in tests)
        apart = any("cloud" in test.split("(")[0] or "the_cloud" in test for test in tests)
        assert both or (apart and len(tests) > 1), (number, DEVICE, CLOUD)


def test_the_document_is_current() -> None:
    current = (ROOT / "docs/robustness.md").read_text(encoding="utf-8")
    assert current == render(), "run: python -m tests.cases.table > docs/robustness.md"
