"""From runs to figures: medians with their spread, ratios to direct decoding, and the JSON of `bench --json`."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from typing_extensions import TypedDict

from edge_agent.bench.answer_timing import AnswerTiming
from edge_agent.bench.contender import DIRECT
from edge_agent.bench.measure import Run

FORMAT = 1
MIN_TOKENS = 4
"""Shorter answers say nothing of decoding speed."""


class Spread(TypedDict):
    """Median and quartiles."""

    median: float
    p25: float
    p75: float


class ContenderFigures(TypedDict):
    """One contender over all scenarios. Null is unknown.

    speedup: geometric mean over the categories of the ratio of median time a token to direct decoding's, from request
    to last token; decode_speedup: the same for decoding alone. equal_texts: answers that are direct's, letter for
    letter, of those compared. acceptance_rate: accepted over drafted; acceptance_by_position: given that the tokens
    before were accepted.
    """

    name: str
    answers: int
    tokens: int
    latency_s: Spread | None
    first_token_s: Spread | None
    tokens_per_second: Spread | None
    speedup: float | None
    decode_speedup: float | None
    drafting_share: float | None
    acceptance_rate: float | None
    acceptance_by_position: list[float]
    tokens_per_round: float | None
    cpu_s_per_token: float | None
    joules_per_token: float | None
    equal_texts: list[int] | None
    categories: dict[str, Spread | None]


def summarise(names: Sequence[str], runs: Sequence[Run]) -> list[ContenderFigures]:
    """The figures of every contender."""
    return [_figures(name, runs) for name in names]


def spread(values: Iterable[float | None]) -> Spread | None:
    """Median and quartiles of what is known; None of nothing."""
    known = sorted(value for value in values if value is not None)
    if not known:
        return None
    quartiles = statistics.quantiles(known, n=4, method="inclusive") if len(known) > 1 else [known[0]] * 3
    return {"median": quartiles[1], "p25": quartiles[0], "p75": quartiles[2]}


def raw(run: Run) -> dict[str, Any]:
    """One run as `--json` lists it."""
    timing = run.timing
    return {
        "contender": run.contender,
        "repeat": run.repeat,
        "prompt": run.prompt,
        "category": run.category,
        "tokens": timing.num_tokens,
        "latency_s": timing.total_s,
        "first_token_s": timing.first_token_s,
        "tokens_per_second": timing.tokens_per_second,
        "draft_s": timing.draft_s,
        "rounds": timing.num_rounds,
        "drafted": timing.num_drafted,
        "accepted": sum(timing.num_accepted) if timing.num_drafted is not None else None,
        "cpu_s": timing.cpu_s,
        "joules": timing.joules,
    }


def _figures(name: str, runs: Sequence[Run]) -> ContenderFigures:
    own = [run for run in runs if run.contender == name]
    direct = {(run.repeat, run.prompt): run for run in runs if run.contender == DIRECT}
    timings = [run.timing for run in own]
    tokens = sum(timing.num_tokens for timing in timings)
    drafted = _sum(timings, lambda timing: timing.num_drafted)
    rounds = _sum(timings, lambda timing: timing.num_rounds)
    draft_s = _sum(timings, lambda timing: timing.draft_s)
    judged, accepted = _by_position(timings)
    pairs = [(run.timing.text, direct[run.repeat, run.prompt].timing.text) for run in own if _key(run) in direct]
    comparable = name != DIRECT and rounds is not None
    return {
        "name": name,
        "answers": len(own),
        "tokens": tokens,
        "latency_s": spread(timing.total_s for timing in timings),
        "first_token_s": spread(timing.first_token_s for timing in timings),
        "tokens_per_second": spread(_speed(timing) for timing in timings),
        "speedup": _speedup(own, direct, lambda timing: timing.total_s / max(timing.num_tokens, 1)),
        "decode_speedup": _speedup(own, direct, lambda timing: 1 / (_speed(timing) or float("nan"))),
        "drafting_share": None if draft_s is None else draft_s / sum(timing.total_s for timing in timings),
        "acceptance_rate": sum(accepted) / drafted if drafted else None,
        "acceptance_by_position": [a / j for a, j in zip(accepted, judged, strict=True)],
        "tokens_per_round": tokens / rounds if rounds else None,
        "cpu_s_per_token": _per_token(timings, tokens, lambda timing: timing.cpu_s),
        "joules_per_token": _per_token(timings, tokens, lambda timing: timing.joules),
        "equal_texts": [sum(a == b for a, b in pairs), len(pairs)] if comparable else None,
        "categories": {
            category: spread(_speed(run.timing) for run in own if run.category == category)
            for category in dict.fromkeys(run.category for run in own)
        },
    }


def _speed(timing: AnswerTiming) -> float | None:
    return timing.tokens_per_second if timing.num_tokens >= MIN_TOKENS else None


def _speedup(
    own: Sequence[Run], direct: dict[tuple[int, int], Run], cost: Callable[[AnswerTiming], float]
) -> float | None:
    """Geometric mean over categories of direct's median cost over this one's, on the prompts that both answered."""
    ratios = []
    for category in dict.fromkeys(run.category for run in own):
        pairs = [(run, direct[_key(run)]) for run in own if run.category == category and _key(run) in direct]
        both = [(cost(a.timing), cost(b.timing)) for a, b in pairs]
        known = [(mine, base) for mine, base in both if mine == mine and base == base]  # NaN equals nothing
        if known:
            ratios.append(statistics.median(base for _, base in known) / statistics.median(mine for mine, _ in known))
    return statistics.geometric_mean(ratios) if ratios else None


def _by_position(timings: Sequence[AnswerTiming]) -> tuple[list[int], list[int]]:
    length = max((len(timing.num_judged) for timing in timings), default=0)
    judged = [sum(t.num_judged[i] for t in timings if i < len(t.num_judged)) for i in range(length)]
    accepted = [sum(t.num_accepted[i] for t in timings if i < len(t.num_accepted)) for i in range(length)]
    return judged, accepted


def _sum(timings: Sequence[AnswerTiming], value: Callable[[AnswerTiming], float | None]) -> float | None:
    values = [value(timing) for timing in timings]
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) and known else None


def _per_token(
    timings: Sequence[AnswerTiming], tokens: int, value: Callable[[AnswerTiming], float | None]
) -> float | None:
    total = _sum(timings, value)
    return total / tokens if total is not None and tokens else None


def _key(run: Run) -> tuple[int, int]:
    return run.repeat, run.prompt
