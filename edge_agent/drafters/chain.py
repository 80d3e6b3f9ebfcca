"""The first drafter that has an idea drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from edge_agent.drafters.base import Drafter
from shared.acceptance import Draft
from shared.sampling import Sampler


class ChainDrafter:
    """Asks its drafters in order, the cheapest first."""

    name = "chain"

    def __init__(self, drafters: Sequence[Drafter], limit: Callable[[str], int] | None = None) -> None:
        """limit: by a drafter's name, the longest draft worth asking of it in the coming round; 0 leaves it out."""
        self._drafters = tuple(drafters)
        self._limit = limit

    async def propose(self, tokens: Sequence[int], gamma: int, sampler: Sampler) -> Draft:
        """The first draft that isn't empty."""
        for drafter in self._drafters:
            wanted = gamma if self._limit is None else min(gamma, self._limit(drafter.name))
            draft = await drafter.propose(tokens, wanted, sampler) if wanted > 0 else Draft()
            if draft.tokens:
                return draft
        return Draft()

    def close(self) -> None:
        """Close all of them."""
        for drafter in self._drafters:
            drafter.close()
