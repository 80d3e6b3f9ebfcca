"""Makes docs/robustness.md of the tests: `python -m tests.cases.table > docs/robustness.md`.

A case's row comes from the docstring of its first test: what goes wrong elsewhere, then `Here:` and what we do.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

CASES = {
    "A": (1, 2, 3, 5, 6, 7, 9, 10, 12, 13, 15, 16),
    "B": (1, 2, 4, 5, 7, 8, 9, 10),
    "C": (1, 2, 3, 4, 6, 8, 10, 11),
    "D": (1, 3, 4, 6, 7, 9, 10, 11, 12),
    "E": (1, 3, 4, 5),
    "F": (2, 4, 5, 6),
    "G": (1, 2, 4, 5, 6, 7, 8),
    "H": (1, 3, 5, 6),
}
"""The failures that are known, by section: each has its test."""

SECTIONS = {
    "A": "Speculative decoding",
    "B": "Streams and text",
    "C": "Inputs",
    "D": "Concurrency",
    "E": "Device signals",
    "F": "Metrics",
    "G": "Models and runtime",
    "H": "Security",
}

HEAD = """# Robustness: known failures, and what holds them off

Failures that users of such systems have reported, each with what goes wrong elsewhere, what we do, and the test that
holds it. The cases of section A run twice: judged on the device, and through the cloud's protocol. Made by
`python -m tests.cases.table`; don't edit it by hand.
"""


@dataclass
class Case:
    """One row of the table."""

    name: str
    elsewhere: str = ""
    here: str = ""
    tests: list[str] = field(default_factory=list)


def cases() -> dict[str, Case]:
    """Every case that has a test, by its id."""
    found: dict[str, Case] = {}
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        for function in _tests(path):
            name = function.name.split("_")[1]
            case = found.setdefault(name, Case(name))
            case.tests.append(f"{path.name}::{function.name}")
            elsewhere, marker, here = " ".join((ast.get_docstring(function) or "").split()).partition(" Here: ")
            if marker and not case.here:
                case.elsewhere, case.here = elsewhere, here[:1].upper() + here[1:]
    return found


def render() -> str:
    """The document."""
    found = cases()
    parts = [HEAD]
    for section, numbers in CASES.items():
        parts.append(f"\n## {section}. {SECTIONS[section]}\n\n| id | elsewhere | here | test |\n|---|---|---|---|\n")
        for number in numbers:
            case = found[f"{section}{number}"]
            tests = "<br>".join(f"`{name.partition('::')[2]}`" for name in case.tests)
            parts.append(f"| {case.name} | {_cell(case.elsewhere)} | {_cell(case.here)} | {tests} |\n")
    return "".join(parts)


def _tests(path: Path) -> Iterator[ast.FunctionDef]:
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and node.name[5:6].isupper():
            yield node


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.write(render())
