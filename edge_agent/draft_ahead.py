"""Drafting on while a verdict is on its way.

The guess is that the whole draft is accepted and that the drafter's own next token is the bonus. If the verdict says
so, the next draft is already there; if not, what was drafted is thrown away: it cost energy, but no text depends on it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from edge_agent.drafters.base import Drafter
from shared.acceptance import Draft
from shared.sampling import Sampler


class DraftAhead:
    """A drafter that can be sent ahead. Only for drafters that read nothing but the tokens they are given."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self._guess: asyncio.Task[tuple[list[int], Draft]] | None = None
        self._gamma = 0
        self.num_started = 0
        self.num_kept = 0

    @property
    def name(self) -> str:
        """The drafter's."""
        return self._drafter.name

    async def propose(self, tokens: Sequence[int], gamma: int, sampler: Sampler) -> Draft:
        """What was drafted ahead if the guess was right, else a draft made now."""
        self._gamma = gamma
        guess, self._guess = self._guess, None
        if guess is not None:
            guessed, ahead = await guess
            if guessed == list(tokens) and ahead.tokens:
                self.num_kept += 1
                return _shortened(ahead, gamma)
        return await self._drafter.propose(tokens, gamma, sampler)

    def start(self, tokens: Sequence[int], draft: Draft, sampler: Sampler) -> None:
        """Draft on from the guess, as much as was last asked for; nothing without a draft of our own to go on from."""
        if draft.drafter == self.name and len(draft) and self._guess is None:
            self.num_started += 1
            self._guess = asyncio.create_task(self._draft_on([*tokens, *draft.tokens], draft, sampler.fork()))

    async def stop(self) -> None:
        """Throw the guess away; the model is free when this returns."""
        guess, self._guess = self._guess, None
        if guess is not None:
            guess.cancel()
            await asyncio.gather(guess, return_exceptions=True)

    def close(self) -> None:
        """The request has ended."""
        if self._guess is not None:
            self._guess.cancel()
        self._drafter.close()

    async def _draft_on(self, tokens: list[int], draft: Draft, sampler: Sampler) -> tuple[list[int], Draft]:
        for token in draft.tokens:
            sampler.append(token)
        ahead = await self._drafter.propose(tokens, self._gamma + 1, sampler)
        if not ahead.tokens:
            return tokens, ahead
        return [*tokens, ahead.tokens[0]], _without_first(ahead)


def _without_first(draft: Draft) -> Draft:
    return Draft(draft.tokens[1:], draft.drafter, draft.distributions[1:], draft.confidences[1:])


def _shortened(draft: Draft, gamma: int) -> Draft:
    return Draft(draft.tokens[:gamma], draft.drafter, draft.distributions[:gamma], draft.confidences[:gamma])
