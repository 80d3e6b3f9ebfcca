"""Writes the dashboards' JSON: `python -m deploy.grafana.generate`. The files are checked in, a test compares them."""

from __future__ import annotations

import json
from pathlib import Path

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from deploy.grafana.boards import boards

DIRECTORY = Path(__file__).parent / "dashboards"


def rendered() -> dict[str, str]:
    """The text of every dashboard by its file's name."""
    return {
        f"{name}.json": json.dumps(dashboard, cls=JSONEncoder, indent=2, sort_keys=True) + "\n"
        for name, dashboard in boards().items()
    }


def main() -> None:
    """Write them all."""
    DIRECTORY.mkdir(exist_ok=True)
    for name, text in rendered().items():
        (DIRECTORY / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
