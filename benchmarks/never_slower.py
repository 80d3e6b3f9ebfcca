"""Is the policy ever slower than direct decoding? Each prompt with speculation off and auto, turn by turn.

    python -m benchmarks.never_slower --preset small --prompts specbench.jsonl [--tokens 64] [--useless] [--every N]

Prints, by category, time a token of direct over that of auto (prefill included; texts that part at a near-tie may
differ in length), and their geometric mean. --useless replaces look-ups by random tokens. Nothing else should run on
the machine meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

import edge_agent.engine
from edge_agent.config import Preset, load_settings
from edge_agent.device import Device
from edge_agent.drafters import NgramDrafter
from edge_agent.engine import Engine
from edge_agent.loading import load_engine
from edge_agent.policy_controller import Senses
from edge_agent.request import GenerationRequest, Speculation
from edge_agent.scenarios import Scenario, built_in, read_scenarios
from shared.acceptance import Draft
from shared.models.progress import RichProgress
from shared.sampling import Sampler, SamplingParams


class UselessDrafter(NgramDrafter):
    """Proposes random tokens, under the n-gram drafter's name."""

    def __init__(self) -> None:
        super().__init__()
        self._random = random.Random(0)

    async def propose(self, tokens: Sequence[int], gamma: int, sampler: Sampler) -> Draft:
        drawn = tuple(self._random.randrange(1000, 40_000) for _ in range(gamma))
        return Draft(drawn, self.name, confidences=(0.6,) * gamma)


async def seconds(engine: Engine, scenario: Scenario, num_tokens: int, speculation: Speculation) -> float:
    """Time a token of a whole greedy answer, from an empty cache."""
    prompt = engine.chat_template.encode(engine.tokenizer, [{"role": "user", "content": scenario.text}])
    request = GenerationRequest(
        tuple(prompt[-(engine.context_length - num_tokens - 1) :]),
        num_tokens,
        SamplingParams(temperature=0),
        engine.tokenizer.eos_ids,
        speculation=speculation,
    )
    engine.forget_prompts()
    num_answered = 0
    started = time.perf_counter()
    async with engine.session(request) as session:
        async for round in session.run():
            num_answered += len(round.tokens)
    return (time.perf_counter() - started) / max(num_answered, 1)


async def measure(
    preset: Preset, scenarios: Sequence[Scenario], num_tokens: int
) -> dict[str, list[tuple[float, float]]]:
    """(direct, auto) of each prompt, by category."""
    settings = load_settings({"preset": preset})
    with RichProgress() as progress:
        engine = await load_engine(settings, Device("push"), Senses(), progress)
    times: dict[str, list[tuple[float, float]]] = defaultdict(list)
    try:
        await seconds(engine, scenarios[0], 8, Speculation.OFF)
        for number, scenario in enumerate(track(scenarios, console=Console(stderr=True))):
            order = [Speculation.OFF, Speculation.AUTO][:: 1 if number % 2 else -1]
            taken = {way: await seconds(engine, scenario, num_tokens, way) for way in order}
            times[scenario.category].append((taken[Speculation.OFF], taken[Speculation.AUTO]))
    finally:
        await engine.close()
    return times


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", type=Preset, choices=list(Preset), default=Preset.SMALL)
    parser.add_argument("--prompts", type=Path, help="a Spec-Bench file; the built-in scenarios by default")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--useless", action="store_true", help="random tokens instead of look-ups")
    parser.add_argument("--every", type=int, default=1, help="only each N-th prompt")
    arguments = parser.parse_args()
    if arguments.useless:
        setattr(edge_agent.engine, "NgramDrafter", UselessDrafter)  # noqa: B010 - mypy wants no assignment here
    scenarios = read_scenarios(arguments.prompts) if arguments.prompts else built_in()
    times = asyncio.run(measure(arguments.preset, scenarios[:: arguments.every], arguments.tokens))
    ratios = {name: sum(d for d, _ in pairs) / sum(a for _, a in pairs) for name, pairs in times.items()}
    table = Table("category", "prompts", "direct / auto")
    for name, ratio in ratios.items():
        table.add_row(name, str(len(times[name])), f"{ratio:.3f}")
    console = Console()
    console.print(table)
    console.print(f"geometric mean {statistics.geometric_mean(ratios.values()):.3f}, worst {min(ratios.values()):.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
