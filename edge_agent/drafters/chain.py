"""The first drafter that has an idea drafts."""

from __future__ import annotations

from collections.abc import Sequence

from edge_agent.drafters.base import Drafter
from shared.acceptance import Draft
from shared.sampling import Sampler


class ChainDrafter:
    """Asks its drafters in order, the cheapest first."""

    name = "chain"

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self._drafters = tuple(drafters)

    async def propose(self, tokens: Sequence[int], gamma: int, sampler: Sampler) -> Draft:
        """The first draft that isn't empty."""
        for drafter in self._drafters:
            draft = await drafter.propose(tokens, gamma, sampler)
            if draft.tokens:
                return draft
        return Draft()

    def close(self) -> None:
        """Close all of them."""
        for drafter in self._drafters:
            drafter.close()
