"""What past answers add where a caller asks for the same kind of thing again and again, as an assistant's app does.

    python -m benchmarks.repeated_requests [--preset small] [--tokens 64]

Plays a list of requests with the pool of past answers, and with the pool emptied before each request, in turns; both
speculate, and both read every prompt from its first token. Prints the ratio of their times by kind of request. Nothing
else should run on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence

from benchmarks.never_slower import Spent, answer
from edge_agent.config import Preset, load_settings
from edge_agent.device import Device
from edge_agent.engine import Engine
from edge_agent.loading import load_engine
from edge_agent.policy_controller import Senses
from edge_agent.request import Speculation
from edge_agent.scenarios import Scenario
from shared.models.progress import RichProgress

KINDS: Mapping[str, tuple[str, Sequence[str]]] = {
    "command": (
        "Write the JSON for this command, with the keys action, device, time and repeat: {}.",
        (
            "set an alarm for half past six on every weekday",
            "turn the heating on at five tomorrow",
            "start the dishwasher at eleven tonight",
            "close the blinds every day at sunset",
            "switch the porch light off at midnight",
            "water the garden on Mondays at seven",
        ),
    ),
    "reply": (
        "Write a short polite reply to this message: {}",
        (
            "Can we move our meeting to Thursday?",
            "The parcel you ordered has been delayed by two days.",
            "Would you like to join us for dinner on Saturday?",
            "Please send me last month's invoice.",
            "Your appointment at the dentist is on Tuesday at nine.",
            "Could you look after our cat next week?",
        ),
    ),
    "code": (
        "Write a Python function with a docstring that {}. Only code.",
        (
            "returns the largest number of a list",
            "counts the vowels of a string",
            "reverses the words of a sentence",
            "checks whether a number is prime",
            "returns the median of a list of numbers",
            "merges two sorted lists",
        ),
    ),
}


def scenarios() -> list[Scenario]:
    """The kinds in turn, as a day would have them."""
    columns = [[Scenario(kind, frame.format(item)) for item in items] for kind, (frame, items) in KINDS.items()]
    return [scenario for row in zip(*columns, strict=True) for scenario in row]


async def play(engine: Engine, num_tokens: int, *, pooled: bool) -> dict[str, Spent]:
    """All requests in a row; what they cost by kind, without each kind's first."""
    spent: dict[str, Spent] = defaultdict(Spent)
    seen: set[str] = set()
    engine.forget_prompts()
    for scenario in scenarios():
        cost = await answer(engine, scenario, num_tokens, Speculation.AUTO, keep_answers=pooled)
        if scenario.category in seen:
            spent[scenario.category] += cost
        seen.add(scenario.category)
    return spent


async def measure(preset: Preset, num_tokens: int) -> dict[str, float]:
    """Time a token without the pool over that with it, by kind."""
    with RichProgress() as progress:
        engine = await load_engine(load_settings({"preset": preset}), Device("push"), Senses(), progress)
    totals: dict[bool, dict[str, Spent]] = {True: defaultdict(Spent), False: defaultdict(Spent)}
    try:
        for pooled in (True, False, False, True):
            for kind, spent in (await play(engine, num_tokens, pooled=pooled)).items():
                totals[pooled][kind] += spent
    finally:
        await engine.close()
    for kind, spent in totals[True].items():
        print(f"{kind}: {spent.accepted['pool']} of {spent.verified['pool']} tokens from the pool stood")
    return {
        kind: plain.seconds / plain.num_tokens / (totals[True][kind].seconds / totals[True][kind].num_tokens)
        for kind, plain in totals[False].items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", type=Preset, choices=list(Preset), default=Preset.SMALL)
    parser.add_argument("--tokens", type=int, default=64)
    arguments = parser.parse_args()
    ratios = asyncio.run(measure(arguments.preset, arguments.tokens))
    for kind, ratio in ratios.items():
        print(f"{kind}: {ratio:.3f}")
    print(f"geometric mean {statistics.geometric_mean(ratios.values()):.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
