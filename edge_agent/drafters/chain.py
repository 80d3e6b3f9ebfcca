"""Several drafters, asked in turn for as long as the next one promises more than what is there."""

from __future__ import annotations

from collections.abc import Sequence

from edge_agent.drafters.base import Appraiser, Drafter, Unpriced
from shared.acceptance import Draft
from shared.sampling import Sampler


class ChainDrafter:
    """Asks its drafters in order, the cheapest first, and takes the draft that is worth the most."""

    name = "chain"

    def __init__(self, drafters: Sequence[Drafter], appraiser: Appraiser | None = None) -> None:
        """appraiser: says what asking and what a draft is worth; without one the first draft is taken."""
        self._drafters = tuple(drafters)
        self._appraiser = appraiser or Unpriced()

    async def propose(self, tokens: Sequence[int], gamma: int, sampler: Sampler) -> Draft:
        """The draft that promises the most; whether that is enough is for whoever trims it."""
        best, best_gain = Draft(), 0.0
        for drafter in self._drafters:
            wanted = min(gamma, self._appraiser.draft_limit(drafter.name))
            if wanted <= 0 or self._appraiser.promise(drafter.name) <= best_gain:
                continue
            draft = await drafter.propose(tokens, wanted, sampler)
            gain = self._appraiser.gain(draft)
            if draft.tokens and (gain > best_gain or not best.tokens):
                best, best_gain = draft, gain
        return best

    def close(self) -> None:
        """Close all of them."""
        for drafter in self._drafters:
            drafter.close()
