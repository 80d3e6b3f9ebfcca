"""Drafting by look-up in past answers to the same caller: what a caller asks again is often answered alike.

Answers stay on the device and never cross from one tenant (API key) to another. A request marked `on_device` neither
reads the pool nor is kept in it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from edge_agent.drafters.ngram import BOUNDARY, NgramIndex
from shared.acceptance import Draft
from shared.sampling import Sampler

MOST_TENANTS = 16
"""Callers whose answers are kept; the one that was silent the longest goes first."""


class TenantAnswers:
    """One tenant's past answers in two indexes: once the young one is full, it is the old one, and the old one goes."""

    def __init__(self, most_tokens: int) -> None:
        self._most_tokens = most_tokens
        self._young = NgramIndex()
        self._old = NgramIndex()

    def add(self, answer: Sequence[int]) -> None:
        """Keep an answer, or its end if it is longer than half of what may be kept."""
        half = self._most_tokens // 2
        kept = answer[max(0, len(answer) + 1 - half) :]
        if len(self._young.tokens) + len(kept) + 1 > half:
            self._young, self._old = NgramIndex(), self._young
        self._young.extend([*kept, BOUNDARY])

    def propose(self, context: Sequence[int], gamma: int, name: str) -> Draft:
        """What followed the longest match in the young answers, else in the old ones."""
        draft = self._young.propose(context, gamma, name)
        return draft if draft.tokens else self._old.propose(context, gamma, name)

    @property
    def num_tokens(self) -> int:
        """Tokens kept, boundaries included."""
        return len(self._young.tokens) + len(self._old.tokens)


class AnswerPool:
    """Past answers by tenant. Belongs to the event loop."""

    def __init__(self, most_tokens: int) -> None:
        """most_tokens: kept of each tenant; 0 for none."""
        self._most_tokens = most_tokens
        self._tenants: OrderedDict[str, TenantAnswers] = OrderedDict()

    def add(self, tenant: str, answer: Sequence[int]) -> None:
        """Keep an answer."""
        if answer and self._most_tokens:
            self._tenants.setdefault(tenant, TenantAnswers(self._most_tokens)).add(answer)
            self._tenants.move_to_end(tenant)
            if len(self._tenants) > MOST_TENANTS:
                self._tenants.popitem(last=False)

    def answers(self, tenant: str) -> TenantAnswers | None:
        """What is kept of a tenant; None if nothing is."""
        return self._tenants.get(tenant)

    def forget(self) -> None:
        """Drop everything."""
        self._tenants.clear()


class PoolDrafter:
    """Looks the last tokens up in past answers."""

    name = "pool"

    def __init__(self, answers: TenantAnswers) -> None:
        self._answers = answers

    async def propose(self, tokens: Sequence[int], gamma: int, sampler: Sampler) -> Draft:
        """What followed the longest n-gram that the tokens end in."""
        return self._answers.propose(tokens, gamma, self.name)

    def close(self) -> None:
        """Nothing to give back."""
