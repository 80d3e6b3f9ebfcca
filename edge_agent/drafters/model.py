"""Drafting with a small model."""

from __future__ import annotations

from collections.abc import Sequence

from edge_agent.drafters.base import Appraiser, Unpriced
from edge_agent.drafters.drawing import Drawing
from shared.acceptance import Draft, common_prefix_length
from shared.causal_lm import CausalLM
from shared.inference_thread import InferenceThread
from shared.sampling import Sampler

CATCH_UP_CHUNK = 128
"""Tokens a catch-up job feeds at most, so that other sessions get their turn in between."""


class ModelDrafter:
    """Draws draft tokens from a small model with the noise that the target will be judged under."""

    name = "model"

    def __init__(self, lm: CausalLM, thread: InferenceThread, appraiser: Appraiser | None = None) -> None:
        """appraiser: says after each token whether another one is worth its cost; without one `gamma` are drawn."""
        self._lm = lm
        self._thread = thread
        self._appraiser = appraiser or Unpriced()
        self._appraiser.has_taken_in(self.name, len(self._lm.tokens))

    async def propose(self, tokens: Sequence[int], gamma: int, sampler: Sampler) -> Draft:
        """At most `gamma` tokens, fewer where the context ends or another one isn't worth drawing.

        The cache first drops what was rejected and takes in what was committed without it: the bonus of the last round,
        or many tokens after rounds in which nothing was drafted.
        """
        gamma = min(gamma, self._lm.context_length - len(tokens))
        if gamma <= 0:
            return Draft(drafter=self.name)
        self._lm.truncate(min(common_prefix_length(self._lm.tokens, tokens), len(tokens) - 1))
        while len(tokens) - len(self._lm.tokens) > CATCH_UP_CHUNK:
            start = len(self._lm.tokens)
            await self._thread.run(self._lm.forward, tokens[start : start + CATCH_UP_CHUNK], 0)
        return await self._thread.run(self._draw, tokens, gamma, sampler)

    def close(self) -> None:
        """The cache stays, for the next request with the same beginning."""

    def _draw(self, tokens: Sequence[int], gamma: int, sampler: Sampler) -> Draft:
        drawing = Drawing(self.name, len(tokens), gamma, sampler, self._appraiser)
        feed = list(tokens[len(self._lm.tokens) :])
        while drawing.wants_more:
            feed = [drawing.add(self._lm.forward(feed, 1)[0])]
        return drawing.draft()
