"""A draft that grows token by token, drawn with the noise that the target will be judged under."""

from __future__ import annotations

from edge_agent.drafters.base import Appraiser
from shared.acceptance import Draft
from shared.causal_lm import Logits
from shared.sampling import Distribution, Sampler, draw, likelihood


class Drawing:
    """Add rows of logits while it wants more."""

    def __init__(self, drafter: str, position: int, gamma: int, sampler: Sampler, appraiser: Appraiser) -> None:
        """position: of the first token in the sequence. gamma: the most tokens. The sampler is forked."""
        self._drafter = drafter
        self._position = position
        self._gamma = gamma
        self._sampler = sampler.fork()
        self._appraiser = appraiser
        self._tokens: list[int] = []
        self._distributions: list[Distribution] = []
        self._confidences: list[float] = []

    @property
    def wants_more(self) -> bool:
        """Whether the draft may grow, and another token is worth what it costs. The first one always is."""
        if not self._tokens:
            return self._gamma > 0
        return len(self._tokens) < self._gamma and self._appraiser.go_on(self._drafter, self._confidences)

    def add(self, logits: Logits) -> int:
        """Draw the next token from its logits, [vocab_size]."""
        distribution = self._sampler.distribution(logits)
        token = draw(distribution, self._sampler.params.seed, self._position + len(self._tokens))
        self._sampler.append(token)
        self._tokens.append(token)
        self._distributions.append(distribution)
        # One that has a single choice, as greedy decoding has, is sure of it; how sure the model is, is not.
        sure = len(distribution.ids) == 1
        self._confidences.append(likelihood(logits, token) if sure else distribution.prob(token))
        return token

    def draft(self) -> Draft:
        """What was drawn."""
        return Draft(tuple(self._tokens), self._drafter, tuple(self._distributions), tuple(self._confidences))
