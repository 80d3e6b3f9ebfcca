"""Interleaved measuring: each prompt goes to every contender before the next one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from edge_agent.bench.answer_timing import AnswerTiming
from edge_agent.bench.contender import Contender
from edge_agent.scenarios import Scenario

WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Run:
    """One answer in its place. prompt: index of the scenario."""

    contender: str
    repeat: int
    prompt: int
    category: str
    timing: AnswerTiming


async def measure(
    contenders: Sequence[Contender],
    scenarios: Sequence[Scenario],
    *,
    max_tokens: int,
    repeats: int,
    on_run: Callable[[Run], None] = lambda run: None,
) -> list[Run]:
    """Every scenario on every contender, `repeats` times, after one short answer each that isn't counted.

    A slow spell of the machine falls on all, since they take turns; who begins moves on from prompt to prompt. Every
    repeat begins with other words, so that no server's prompt cache helps one side.
    """
    for contender in contenders:
        scenario = next((s for s in scenarios if contender.takes(s)), None)
        if scenario is not None:
            await contender.answer(_worded(scenario, 0), WARM_UP_TOKENS)
    runs: list[Run] = []
    turn = 0
    for repeat in range(1, repeats + 1):
        for number, scenario in enumerate(scenarios):
            taking = [contender for contender in contenders if contender.takes(scenario)]
            for step in range(len(taking)):
                contender = taking[(turn + step) % len(taking)]
                timing = await contender.answer(_worded(scenario, repeat), max_tokens)
                runs.append(Run(contender.name, repeat, number, scenario.category, timing))
                on_run(runs[-1])
            turn += 1
    return runs


def num_runs(contenders: Sequence[Contender], scenarios: Sequence[Scenario], repeats: int) -> int:
    """How many answers `measure` counts."""
    return repeats * sum(contender.takes(scenario) for contender in contenders for scenario in scenarios)


def _worded(scenario: Scenario, repeat: int) -> Scenario:
    return replace(scenario, text=f"Request {repeat}: {scenario.text}")
