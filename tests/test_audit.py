"""What `make audit` finds in our own code: nothing that isn't answered in docs/security.md."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def bandit_arguments() -> list[str]:
    """As the Makefile calls it."""
    found = re.search(r"-m (bandit .*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert found is not None
    return found[1].split()


def test_bandit_finds_nothing() -> None:
    result = subprocess.run([sys.executable, "-m", *bandit_arguments()], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


def test_what_bandit_is_told_to_skip_is_answered() -> None:
    skipped = set(bandit_arguments()[-1].split(","))
    inline = {
        code
        for package in ("edge_agent", "cloud_service", "shared")
        for path in (ROOT / package).rglob("*.py")
        for code in re.findall(r"# nosec (B\d+)", path.read_text())
    }
    answered = set(re.findall(r"\bB\d{3}\b", (ROOT / "docs/security.md").read_text()))
    assert skipped | inline == answered
