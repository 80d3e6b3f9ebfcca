"""Rounds without a model: costs from a curve, acceptance from a coin, so that a policy's gain can be computed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from edge_agent.controller import RoundState
from edge_agent.decision import Decision, Mode
from edge_agent.drafters import ChainDrafter
from edge_agent.drafters.base import Appraiser
from edge_agent.policy_controller import PolicyController
from edge_agent.request import GenerationRequest
from edge_agent.round import FinishReason, Origin, Round, TokenEvent
from shared.acceptance import Draft
from shared.sampling import Sampler, SamplingParams

CURVES = {
    # Milliseconds of one target pass over m = 1, 2, … positions on a 2-core AVX2 machine.
    "tiny": [10.5, 14.0, 18.5, 22.0, 25.0, 27.3, 29.7, 32.0, 34.3],
    "small": [29.0, 35.0, 43.0, 56.0, 69.0, 79.0, 89.0, 99.0, 109.0],
    "laptop": [89.0, 106.0, 137.0, 160.0, 177.0, 200.0, 222.0, 245.0, 268.0],
}


def curve(name: str) -> list[float]:
    """Seconds."""
    return [value / 1e3 for value in CURVES[name]]


GOOD, BAD = 7, 8
"""What a coin drafter's tokens are: the target takes one kind and never the other."""


@dataclass
class Drafts:
    """A drafter by coin: offers a draft in some rounds, each token accepted with a chance given those before it.

    confidence: the same for all tokens, or None: drawn for each from 0.4 to 1, and then the chance is rate times it.
    """

    offered: float
    rate: float
    name: str = "ngram"
    confidence: float | None = 0.6
    cost_s: float = 0.00005
    catch_up_s: float = 0.0


@dataclass
class Result:
    tokens: int = 0
    seconds: float = 0.0
    decisions: list[Decision] = field(default_factory=list)
    verified: list[int] = field(default_factory=list)
    drafters: Counter[str] = field(default_factory=Counter)


class CoinDrafter:
    """Drafts by coin, in simulated time."""

    def __init__(self, kind: Callable[[int], Drafts], appraiser: Appraiser, prompt: int, rng: random.Random) -> None:
        self._kind = kind
        self._appraiser = appraiser
        self._prompt = prompt
        self._rng = rng
        self._taken_in = 0
        self.seconds = 0.0
        self.name = kind(0).name

    async def propose(self, tokens: Sequence[int], gamma: int, sampler: Sampler) -> Draft:
        kind = self._kind(len(tokens) - self._prompt)
        self.seconds += max(len(tokens) - self._taken_in - 2, 0) * kind.catch_up_s
        self._taken_in = len(tokens)
        if self._rng.random() >= kind.offered:
            self.seconds += kind.cost_s
            return Draft(drafter=kind.name)
        drawn: list[int] = []
        confidences: list[float] = []
        while len(drawn) < gamma and (not drawn or self._appraiser.go_on(kind.name, confidences)):
            told = kind.confidence
            confidences.append(self._rng.uniform(0.4, 1.0) if told is None else told)
            chance = kind.rate * confidences[-1] if told is None else kind.rate
            drawn.append(GOOD if self._rng.random() < chance else BAD)
            self.seconds += kind.cost_s
        return Draft(tuple(drawn), kind.name, confidences=tuple(confidences))

    def close(self) -> None:
        """Nothing to give back."""


def play(
    controller: PolicyController,
    request: GenerationRequest,
    costs: Sequence[float],
    drafts: Sequence[Callable[[int], Drafts]],
    rng: random.Random,
    jitter: float = 0.0,
    advance: Callable[[float], None] = lambda seconds: None,
) -> Result:
    """Play one request. drafts: for each drafter, the cheapest first, what it is after so many tokens."""
    result = Result()
    coins = [CoinDrafter(kind, controller, len(request.prompt), rng) for kind in drafts]
    chain = ChainDrafter(coins, controller)
    sampler = Sampler(SamplingParams())
    while result.tokens < request.max_tokens:
        state = RoundState(request, len(result.decisions), result.tokens, 10_000)
        decision = controller.decide(state)
        gamma = min(decision.gamma, state.num_left - 1)
        draft, before = Draft(), sum(coin.seconds for coin in coins)
        if gamma > 0:
            draft = _outcome(chain.propose([*request.prompt, *[GOOD] * result.tokens], gamma, sampler))
            keep = controller.trim(state, draft)
            draft = Draft(draft.tokens[:keep], draft.drafter, confidences=draft.confidences[:keep])
        draft_s = sum(coin.seconds for coin in coins) - before
        accepted = (*draft.tokens, BAD).index(BAD)
        verify_s = costs[len(draft)] * rng.lognormvariate(0.0, jitter)
        result.tokens += accepted + 1
        finish = FinishReason.LENGTH if result.tokens >= request.max_tokens else None
        events = tuple(TokenEvent(i, GOOD, Origin.TARGET) for i in range(accepted + 1))
        round = Round(
            len(result.decisions), decision, draft, accepted, GOOD, events, draft_s, verify_s, finish_reason=finish
        )
        controller.observe(state, round)
        advance(draft_s + verify_s)
        result.seconds += draft_s + verify_s
        result.decisions.append(decision)
        result.verified.append(len(draft))
        result.drafters[draft.drafter if draft.tokens else "none"] += 1
        assert decision.mode in (Mode.LOCAL_DIRECT, Mode.LOCAL_SPECULATIVE)
    return result


def _outcome(proposal: Coroutine[Any, Any, Draft]) -> Draft:
    """Of a proposal that waits for nothing."""
    try:
        proposal.send(None)
    except StopIteration as stop:
        return cast(Draft, stop.value)
    raise AssertionError("a coin drafter waits for nothing")
