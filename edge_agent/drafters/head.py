"""Drafting with a head: one layer over the hidden states that the target's own passes leave behind."""

from __future__ import annotations

from collections.abc import Sequence

from edge_agent.drafters.base import Appraiser, Unpriced
from edge_agent.drafters.drawing import Drawing
from edge_agent.drafters.model import CATCH_UP_CHUNK
from shared.acceptance import Draft, common_prefix_length
from shared.draft_head import DraftHead, HeadOutput, HiddenStates
from shared.inference_thread import InferenceThread
from shared.sampling import Sampler


class HeadDrafter:
    """Draws draft tokens from a head with the noise that the target will be judged under.

    It reads the hidden states of committed tokens, so it has nothing to say where the target hasn't been: before the
    prompt was read, and after rounds that another verifier served.
    """

    name = "head"

    def __init__(
        self, head: DraftHead, target: HiddenStates, thread: InferenceThread, appraiser: Appraiser | None = None
    ) -> None:
        """appraiser: says after each token whether another one is worth its cost; without one `gamma` are drawn."""
        self._head = head
        self._target = target
        self._thread = thread
        self._appraiser = appraiser or Unpriced()
        self._appraiser.has_taken_in(self.name, len(self._head.tokens))

    async def propose(self, tokens: Sequence[int], gamma: int, sampler: Sampler) -> Draft:
        """At most `gamma` tokens, fewer where the context ends or another one isn't worth drawing.

        What was committed without the head is taken in first, together with the last round's tokens.
        """
        gamma = min(gamma, self._head.context_length - len(tokens))
        known = common_prefix_length(self._target.tokens, tokens)
        if gamma <= 0 or len(tokens) < 2 or known < len(tokens) - 1:
            return Draft(drafter=self.name)
        self._head.truncate(min(common_prefix_length(self._head.tokens, tokens), len(tokens) - 1))
        while len(tokens) - len(self._head.tokens) > CATCH_UP_CHUNK:
            await self._thread.run(self._take_in, tokens[: len(self._head.tokens) + CATCH_UP_CHUNK])
        return await self._thread.run(self._draw, tokens, gamma, sampler)

    def close(self) -> None:
        """The cache stays, for the next request with the same beginning."""

    def _take_in(self, tokens: Sequence[int]) -> HeadOutput:
        """Feed what is new, each token with the target's hidden state of the token before it."""
        start = len(self._head.tokens)
        features = self._target.hidden_states(max(start, 1) - 1, len(tokens) - 1)
        return self._head.forward(tokens[start:], features)

    def _draw(self, tokens: Sequence[int], gamma: int, sampler: Sampler) -> Draft:
        drawing = Drawing(self.name, len(tokens), gamma, sampler, self._appraiser)
        output = self._take_in(tokens)
        token = drawing.add(output.logits)
        while drawing.wants_more:
            output = self._head.forward([token], output.features)
            token = drawing.add(output.logits)
        # Its own features stood in for the target's; what is accepted is taken in again with the true ones.
        self._head.truncate(len(tokens))
        return drawing.draft()
