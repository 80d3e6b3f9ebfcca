"""The demo's race: one request decoded directly and with drafts, each round told as it happens."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator
from typing import Any

from edge_agent.agent import Agent
from edge_agent.comparison import compare
from edge_agent.completion import Completion
from edge_agent.request import Execution, GenerationRequest, Speculation
from edge_agent.round import TokenEvent
from edge_agent.round_view import RoundViewer

DIRECT = "direct"
SPECULATIVE = "speculative"

Events = AsyncGenerator[dict[str, Any], None]


async def race(agent: Agent, request: GenerationRequest) -> Events:
    """Both lanes, one after the other on the same model, so that neither slows the other, each from an empty cache.

    A discarded token comes first: the first pass over a prompt of this length pays for buffers that later ones reuse.
    """
    on_device = dataclasses.replace(request, execution=Execution.ONLY_DEVICE)
    yield {"type": "race", "model": agent.engine.model_name, "prompt_tokens": len(request.prompt)}
    await _warm_up(agent, dataclasses.replace(on_device, max_tokens=1, speculation=Speculation.OFF))
    answers: dict[str, list[TokenEvent]] = {}
    lanes = {DIRECT: dataclasses.replace(on_device, speculation=Speculation.OFF), SPECULATIVE: on_device}
    for lane, lane_request in lanes.items():
        agent.engine.forget_prompts()
        answers[lane] = []
        async for event in run(agent, lane_request, lane, answers[lane]):
            yield event
    comparison = compare(answers[DIRECT], answers[SPECULATIVE], request.sampling)
    yield {"type": "comparison"} | dataclasses.asdict(comparison)


async def run(agent: Agent, request: GenerationRequest, lane: str, answer: list[TokenEvent]) -> Events:
    """One answer, round by round. Its tokens are added to `answer`. at_ms: since the lane's start."""
    yield {"type": "lane", "lane": lane, "prompt_tokens": len(request.prompt)}
    arrived = agent.clock()
    viewer = RoundViewer(agent.engine.tokenizer)
    completion = Completion(agent, request, arrived=arrived)
    ended = arrived
    async with completion.open() as pieces:
        async for piece in pieces:
            ended = agent.clock()
            answer.extend(piece.tokens)
            yield {"type": "round", "lane": lane, "at_ms": round((ended - arrived) * 1e3, 2)} | viewer.view(piece)
    report = completion.tally.report()
    yield {"type": "end", "lane": lane, "total_ms": round((ended - arrived) * 1e3, 2), "report": report}


async def _warm_up(agent: Agent, request: GenerationRequest) -> None:
    completion = Completion(agent, request, arrived=agent.clock())
    async with completion.open() as pieces:
        async for _ in pieces:
            pass
