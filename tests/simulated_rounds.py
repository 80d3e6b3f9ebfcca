"""Rounds without a model: costs from a curve, acceptance from a coin, so that a policy's gain can be computed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from edge_agent.controller import RoundState
from edge_agent.decision import Decision, Mode
from edge_agent.policy_controller import PolicyController
from edge_agent.request import GenerationRequest
from edge_agent.round import FinishReason, Origin, Round, TokenEvent
from shared.acceptance import Draft

CURVES = {
    # Milliseconds of one target pass over m = 1, 2, … positions on a 2-core AVX2 machine.
    "tiny": [10.5, 14.0, 18.5, 22.0, 25.0, 27.3, 29.7, 32.0, 34.3],
    "small": [29.0, 35.0, 43.0, 56.0, 69.0, 79.0, 89.0, 99.0, 109.0],
    "laptop": [89.0, 106.0, 137.0, 160.0, 177.0, 200.0, 222.0, 245.0, 268.0],
}


def curve(name: str) -> list[float]:
    """Seconds."""
    return [value / 1e3 for value in CURVES[name]]


@dataclass
class Drafts:
    """A drafter by coin: offers a draft in some rounds, each token accepted with a chance given those before it."""

    offered: float
    rate: float
    name: str = "ngram"
    confidence: float = 0.6
    cost_s: float = 0.00005


@dataclass
class Result:
    tokens: int = 0
    seconds: float = 0.0
    decisions: list[Decision] = field(default_factory=list)
    verified: list[int] = field(default_factory=list)


def play(
    controller: PolicyController,
    request: GenerationRequest,
    costs: Sequence[float],
    drafts: Callable[[int], Drafts],
    rng: random.Random,
    jitter: float = 0.0,
    advance: Callable[[float], None] = lambda seconds: None,
) -> Result:
    """Play one request. drafts: what is offered after so many tokens."""
    result = Result()
    while result.tokens < request.max_tokens:
        state = RoundState(request, len(result.decisions), result.tokens, 10_000)
        decision = controller.decide(state)
        kind = drafts(result.tokens)
        gamma = min(decision.gamma, state.num_left - 1)
        draft, draft_s = Draft(), 0.0
        if gamma > 0 and controller.draft_limit(kind.name) > 0 and controller.promise(kind.name) > 0:
            longest = min(gamma, controller.draft_limit(kind.name)) if rng.random() < kind.offered else 0
            confidences = [kind.confidence] * min(longest, 1)
            while 0 < len(confidences) < longest and controller.go_on(kind.name, confidences):
                confidences.append(kind.confidence)
            draft = Draft((7,) * len(confidences), kind.name, confidences=tuple(confidences))
            draft_s = kind.cost_s * max(len(draft), 1)
            controller.gain(draft)
            keep = controller.trim(state, draft)
            draft = Draft((7,) * keep, kind.name, confidences=(kind.confidence,) * keep)
        accepted = 0
        while accepted < len(draft) and rng.random() < kind.rate:
            accepted += 1
        verify_s = costs[len(draft)] * rng.lognormvariate(0.0, jitter)
        result.tokens += accepted + 1
        finish = FinishReason.LENGTH if result.tokens >= request.max_tokens else None
        events = tuple(TokenEvent(i, 7, Origin.TARGET) for i in range(accepted + 1))
        round = Round(
            len(result.decisions), decision, draft, accepted, 7, events, draft_s, verify_s, finish_reason=finish
        )
        controller.observe(state, round)
        advance(draft_s + verify_s)
        result.seconds += draft_s + verify_s
        result.decisions.append(decision)
        result.verified.append(len(draft))
        assert decision.mode in (Mode.LOCAL_DIRECT, Mode.LOCAL_SPECULATIVE)
    return result
