"""Is the policy ever slower than direct decoding? Each prompt with speculation off and auto, turn by turn.

    python -m benchmarks.never_slower --preset small --prompts specbench.jsonl [--tokens 64] [--useless] [--every N]
                                      [--categories qa,rag] [--repeats N]

Prints, by category, time and CPU seconds a token of direct over those of auto (prefill included; texts that part at a
near-tie may differ in length), their geometric means, and what each drafter's drafts came to. --useless has every
drafter work as it does and then replaces its tokens by random ones. Nothing else should run on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

import edge_agent.engine
from edge_agent.config import Preset, load_settings
from edge_agent.device import Device
from edge_agent.drafters import ChainDrafter, Drafter
from edge_agent.drafters.base import Appraiser
from edge_agent.engine import Engine
from edge_agent.loading import load_engine
from edge_agent.policy_controller import Senses
from edge_agent.request import GenerationRequest, Speculation
from edge_agent.scenarios import Scenario, built_in, read_scenarios
from shared.acceptance import Draft
from shared.models.progress import RichProgress
from shared.sampling import Sampler, SamplingParams


class Useless:
    """A drafter's cost, name and confidence without its sense. A look-up that finds nothing makes something up."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self._random = random.Random(0)

    @property
    def name(self) -> str:
        return self._drafter.name

    async def propose(self, tokens: Sequence[int], gamma: int, sampler: Sampler) -> Draft:
        draft = await self._drafter.propose(tokens, gamma, sampler)
        confidences = draft.confidences or (0.6,) * gamma
        drawn = tuple(self._random.randrange(1000, 40_000) for _ in confidences)
        return Draft(drawn, self.name, confidences=confidences)

    def close(self) -> None:
        self._drafter.close()


class UselessChain(ChainDrafter):
    """The engine's drafters, all of them useless."""

    def __init__(self, drafters: Sequence[Drafter], appraiser: Appraiser | None = None) -> None:
        super().__init__([Useless(drafter) for drafter in drafters], appraiser)


@dataclass
class Spent:
    """What answers cost, prefill included. verified, accepted: tokens by drafter."""

    seconds: float = 0.0
    cpu_s: float = 0.0
    num_tokens: int = 0
    verified: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)

    def __add__(self, other: Spent) -> Spent:
        return Spent(
            self.seconds + other.seconds,
            self.cpu_s + other.cpu_s,
            self.num_tokens + other.num_tokens,
            self.verified + other.verified,
            self.accepted + other.accepted,
        )


async def answer(
    engine: Engine, scenario: Scenario, num_tokens: int, speculation: Speculation, *, keep_answers: bool = False
) -> Spent:
    """A whole greedy answer, from an empty cache. keep_answers: past answers may be drafted from."""
    prompt = engine.chat_template.encode(engine.tokenizer, [{"role": "user", "content": scenario.text}])
    request = GenerationRequest(
        tuple(prompt[-(engine.context_length - num_tokens - 1) :]),
        num_tokens,
        SamplingParams(temperature=0),
        engine.tokenizer.eos_ids,
        prediction=tuple(engine.tokenizer.encode(scenario.prediction)) if scenario.prediction else (),
        speculation=speculation,
    )
    engine.forget_prompts(keep_answers=keep_answers)
    spent = Spent()
    started, cpu = time.perf_counter(), time.process_time()
    async with engine.session(request) as session:
        async for round in session.run():
            spent.num_tokens += len(round.tokens)
            spent.verified[round.draft.drafter] += len(round.draft)
            spent.accepted[round.draft.drafter] += round.accepted
    return replace(spent, seconds=time.perf_counter() - started, cpu_s=time.process_time() - cpu)


@dataclass
class Pair:
    """Both ways over the same prompts."""

    direct: Spent = field(default_factory=Spent)
    auto: Spent = field(default_factory=Spent)
    num_prompts: int = 0

    def add(self, direct: Spent, auto: Spent) -> None:
        """One more prompt."""
        self.direct, self.auto, self.num_prompts = self.direct + direct, self.auto + auto, self.num_prompts + 1

    @property
    def speedup(self) -> float:
        """Time a token of direct over that of auto. Texts of a category are weighed by their length."""
        return self.direct.seconds / self.direct.num_tokens / (self.auto.seconds / self.auto.num_tokens)

    @property
    def cpu_share(self) -> float:
        """CPU seconds a token of auto over those of direct."""
        return self.auto.cpu_s / self.auto.num_tokens / (self.direct.cpu_s / self.direct.num_tokens)


def _median(spent: Sequence[Spent]) -> Spent:
    """The one of middling time; the quicker of two."""
    return sorted(spent, key=lambda each: each.seconds)[(len(spent) - 1) // 2]


async def measure(preset: Preset, scenarios: Sequence[Scenario], num_tokens: int, repeats: int) -> dict[str, Pair]:
    """All prompts, by category; of the repeats of one, each way's median."""
    settings = load_settings({"preset": preset})
    with RichProgress() as progress:
        engine = await load_engine(settings, Device("push"), Senses(), progress)
    pairs: dict[str, Pair] = defaultdict(Pair)
    try:
        await answer(engine, scenarios[0], 8, Speculation.OFF)
        for number, scenario in enumerate(scenarios):
            order = [Speculation.OFF, Speculation.AUTO][:: 1 if number % 2 else -1]
            spent: dict[Speculation, list[Spent]] = {way: [] for way in order}
            for way in order * repeats:
                spent[way].append(await answer(engine, scenario, num_tokens, way))
            pair = pairs[scenario.category]
            pair.add(_median(spent[Speculation.OFF]), _median(spent[Speculation.AUTO]))
            print(f"{number + 1}/{len(scenarios)} {scenario.category}: {pair.speedup:.3f}", file=sys.stderr, flush=True)
    finally:
        await engine.close()
    return pairs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", type=Preset, choices=list(Preset), default=Preset.SMALL)
    parser.add_argument("--prompts", type=Path, help="a Spec-Bench file; the built-in scenarios by default")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=1, help="turns of both ways with each prompt; medians count")
    parser.add_argument("--useless", action="store_true", help="random tokens in every draft")
    parser.add_argument("--every", type=int, default=1, help="only each N-th prompt")
    parser.add_argument("--categories", default="", help="only these, parted by commas")
    arguments = parser.parse_args()
    if arguments.useless:
        setattr(edge_agent.engine, "ChainDrafter", UselessChain)  # noqa: B010 - mypy wants no assignment here
    scenarios = read_scenarios(arguments.prompts) if arguments.prompts else built_in()
    wanted = arguments.categories.split(",") if arguments.categories else {each.category for each in scenarios}
    chosen = [each for each in scenarios[:: arguments.every] if each.category in wanted]
    pairs = asyncio.run(measure(arguments.preset, chosen, arguments.tokens, arguments.repeats))
    table = Table("category", "prompts", "direct / auto", "CPU auto / direct", "accepted of verified, by drafter")
    for name, pair in pairs.items():
        drafted = ", ".join(
            f"{drafter} {pair.auto.accepted[drafter]}/{count}" for drafter, count in pair.auto.verified.items() if count
        )
        table.add_row(name, str(pair.num_prompts), f"{pair.speedup:.3f}", f"{pair.cpu_share:.3f}", drafted)
    speedups = [pair.speedup for pair in pairs.values()]
    console = Console(width=140)
    console.print(table)
    console.print(
        f"geometric mean {statistics.geometric_mean(speedups):.3f}, worst {min(speedups):.3f}, "
        f"CPU {statistics.geometric_mean(pair.cpu_share for pair in pairs.values()):.3f}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
