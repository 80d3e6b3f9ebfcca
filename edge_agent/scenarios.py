"""What people ask a small model on their own device: the built-in prompts of `bench` and of the demo page."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from shared.errors import ConfigError


@dataclass(frozen=True)
class Scenario:
    """One user message, with an output that the caller expects (OpenAI's `prediction`) where there is one."""

    category: str
    text: str
    prediction: str | None = None
    on_device: bool = False


def built_in() -> tuple[Scenario, ...]:
    """Commands, translation, a private question, a summary, code and edits."""
    article, code = _text("lighthouse.txt"), _text("total_price.txt")
    block = f"```python\n{code}\n```"
    return (
        Scenario("command", "Write the JSON for this command: set an alarm for half past six on every weekday."),
        Scenario("command", "Write a short reply: I can't come on Friday, could we meet on Monday at ten instead?"),
        Scenario("translation", "Translate into Chinese: The train to the airport leaves from platform four at noon."),
        Scenario("translation", "翻译成英文:请在出发前把窗户关好,并检查煤气是否已经关闭。"),
        Scenario(
            "private",
            "My father takes warfarin and was given ibuprofen for his knee. What should I watch out for?",
            on_device=True,
        ),
        Scenario("summary", f"Summarise the text in three sentences, keeping names and numbers.\n\n{article}"),
        Scenario("summary", f"List every date in the text with what happened then, quoting the text.\n\n{article}"),
        Scenario("edit", f"Rename `total` to `subtotal` everywhere and return only the code.\n\n{block}"),
        Scenario(
            "prediction",
            f"Change the member discount to 10 percent and return the whole function, only code.\n\n{block}",
            prediction=block.replace("0.95", "0.90"),
        ),
        Scenario("code", "Write a Python function that checks whether the brackets in a string are balanced."),
    )


def read_scenarios(path: Path) -> tuple[Scenario, ...]:
    """The first turns of a Spec-Bench file: a JSON object a line, with `category` and `turns`.

    Raises:
        ConfigError: the file can't be read, or a line isn't such an object; names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"prompts can't be read from {path}: {error}") from error
    scenarios = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                row = json.loads(line)
                scenarios.append(Scenario(str(row["category"]), str(row["turns"][0])))
            except (ValueError, KeyError, TypeError, IndexError) as error:
                raise ConfigError(
                    f'{path}, line {number}: expected {{"category": "…", "turns": ["…"]}}, found {line[:60]!r}'
                ) from error
    if not scenarios:
        raise ConfigError(f"{path} holds no prompts")
    return tuple(scenarios)


def _text(name: str) -> str:
    return resources.files("edge_agent").joinpath("data", name).read_text(encoding="utf-8").strip()
