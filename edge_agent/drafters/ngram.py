"""Drafting by look-up: what followed the last tokens when they stood here before (prompt look-up decoding)."""

from __future__ import annotations

from collections.abc import Sequence

from shared.acceptance import Draft
from shared.sampling import Sampler

LONGEST_MATCH = 5
SHORTEST_MATCH = 2


class NgramIndex:
    """For each n-gram of a growing sequence, where its latest occurrence that has a successor ends."""

    def __init__(self, longest: int = LONGEST_MATCH, shortest: int = SHORTEST_MATCH) -> None:
        self.tokens: list[int] = []
        self._lengths = range(longest, shortest - 1, -1)
        self._ends: dict[tuple[int, ...], int] = {}

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens. An n-gram is entered once its successor is known, so it never finds itself."""
        start = len(self.tokens)
        self.tokens.extend(tokens)
        for end in range(max(start, 1), len(self.tokens)):
            for length in self._lengths:
                if length <= end:
                    self._ends[tuple(self.tokens[end - length : end])] = end

    def lookup(self, context: Sequence[int]) -> tuple[int, int]:
        """(index of the successor, length of the match) of the longest n-gram that ends `context`; (0, 0) if none."""
        for length in self._lengths:
            if length <= len(context):
                end = self._ends.get(tuple(context[len(context) - length :]))
                if end is not None:
                    return end, length
        return 0, 0


def match_confidence(length: int) -> float:
    """How likely a looked-up successor is right, by the length of the match.

    A prior that the measured acceptance soon outweighs: about 0.5 for two tokens, 0.75 for four.
    """
    return length / (length + 1.5)


class NgramDrafter:
    """Looks the last tokens up in the request's own prompt and answer."""

    name = "ngram"

    def __init__(self) -> None:
        self._index = NgramIndex()

    async def propose(self, tokens: Sequence[int], gamma: int, sampler: Sampler) -> Draft:
        """What followed the longest n-gram that the tokens end in."""
        self._index.extend(tokens[len(self._index.tokens) :])
        return _successors(self._index, tokens, gamma, self.name)

    def close(self) -> None:
        """Nothing to give back."""


class PredictionDrafter:
    """Looks the last tokens up in an output that the caller predicted (OpenAI's `prediction`)."""

    name = "prediction"

    def __init__(self, prediction: Sequence[int], prompt_length: int) -> None:
        self._index = NgramIndex(shortest=1)
        self._index.extend(prediction)
        self._prompt_length = prompt_length

    async def propose(self, tokens: Sequence[int], gamma: int, sampler: Sampler) -> Draft:
        """Its beginning for an answer's beginning, afterwards what follows the longest match."""
        answer = tokens[self._prompt_length :]
        if not answer:
            start = tuple(self._index.tokens[:gamma])
            return Draft(start, self.name, confidences=(match_confidence(LONGEST_MATCH),) * len(start))
        return _successors(self._index, answer, gamma, self.name)

    def close(self) -> None:
        """Nothing to give back."""


def _successors(index: NgramIndex, context: Sequence[int], gamma: int, name: str) -> Draft:
    start, length = index.lookup(context)
    if not length or not gamma:
        return Draft(drafter=name)
    proposed = tuple(index.tokens[start : start + gamma])
    return Draft(proposed, name, confidences=(match_confidence(length),) * len(proposed))
