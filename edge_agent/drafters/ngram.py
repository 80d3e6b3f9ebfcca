"""Drafting by look-up: what followed the last tokens when they stood here before (prompt look-up decoding)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shared.acceptance import Draft
from shared.sampling import Sampler

LONGEST_KEY = 4
"""The longest n-gram that is looked up; a match is then followed back as far as it goes."""

LONGEST_MATCH = 16

BOUNDARY = -1
"""Stands between two texts of one index: no token, so no match reaches over it and no draft holds it."""


MATCH_CONFIDENCES = (0.25, 0.55, 0.7, 0.72, 0.75, 0.78, 0.8, 0.82)
"""How often the successor of a match of 1, 2, … tokens was right, in answers of the 1.5B to Spec-Bench's prompts."""

SPLIT = 0.35
"""How much less likely a successor is that wasn't the same the time before."""


@dataclass(frozen=True)
class Match:
    """Where the last tokens stood before. start: index of what followed. length: how many tokens agree, at least 1.

    split: whether they were followed by another token the time before.
    """

    start: int
    length: int
    split: bool = False

    def confidences(self, count: int) -> tuple[float, ...]:
        """How likely each of the next `count` tokens is right, given those before it: with each, the match is longer.

        First guesses, which measured acceptance soon outweighs.
        """
        first = match_confidence(self.length) * (SPLIT if self.split else 1.0)
        return (first, *(match_confidence(self.length + index) for index in range(1, count)))


def match_confidence(length: int) -> float:
    """How likely the successor of a match of this length is right."""
    return MATCH_CONFIDENCES[min(length, len(MATCH_CONFIDENCES)) - 1]


class NgramIndex:
    """For each n-gram of a growing text, where its latest occurrence that has a successor ends."""

    def __init__(self, shortest: int = 1) -> None:
        """shortest: the fewest tokens that make a match."""
        self.tokens: list[int] = []
        self._shortest = shortest
        self._ends: dict[tuple[int, ...], int] = {}
        self._splits: set[tuple[int, ...]] = set()

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens. An n-gram is entered once its successor is known, so it never finds itself."""
        text, ends, splits = self.tokens, self._ends, self._splits
        start = len(text)
        text.extend(tokens)
        for end in range(max(start, 1), len(text)):
            if text[end] == BOUNDARY:
                continue
            for length in range(self._shortest, min(LONGEST_KEY, end) + 1):
                if BOUNDARY in (key := tuple(text[end - length : end])):
                    break
                last = ends.get(key, end)
                if text[last] != text[end]:
                    splits.add(key)
                else:
                    splits.discard(key)
                ends[key] = end

    def lookup(self, context: Sequence[int]) -> Match | None:
        """The longest n-gram that ends `context`."""
        for length in range(min(LONGEST_KEY, len(context)), self._shortest - 1, -1):
            key = tuple(context[len(context) - length :])
            end = self._ends.get(key)
            if end is not None:
                return Match(end, self._followed_back(end, length, context), key in self._splits)
        return None

    def propose(self, context: Sequence[int], gamma: int, name: str) -> Draft:
        """A draft of what followed the longest n-gram that ends `context`."""
        match = self.lookup(context)
        if match is None or gamma <= 0:
            return Draft(drafter=name)
        proposed = self.tokens[match.start : match.start + gamma]
        if BOUNDARY in proposed:
            proposed = proposed[: proposed.index(BOUNDARY)]
        return Draft(tuple(proposed), name, confidences=match.confidences(len(proposed)))

    def _followed_back(self, end: int, length: int, context: Sequence[int]) -> int:
        most = min(LONGEST_MATCH, end, len(context))
        while length < most and self.tokens[end - length - 1] == context[-length - 1]:
            length += 1
        return length


class NgramDrafter:
    """Looks the last tokens up in the request's own prompt and answer."""

    name = "ngram"

    def __init__(self, shortest: int = 2) -> None:
        """shortest: the fewest tokens that make a match. One alone is right too rarely to be drafted from blindly."""
        self._index = NgramIndex(shortest)

    async def propose(self, tokens: Sequence[int], gamma: int, sampler: Sampler) -> Draft:
        """What followed the longest n-gram that the tokens end in."""
        self._index.extend(tokens[len(self._index.tokens) :])
        return self._index.propose(tokens, gamma, self.name)

    def close(self) -> None:
        """Nothing to give back."""


class PredictionDrafter:
    """Looks the last tokens up in an output that the caller predicted (OpenAI's `prediction`)."""

    name = "prediction"

    def __init__(self, prediction: Sequence[int], prompt_length: int) -> None:
        self._index = NgramIndex()
        self._index.extend(prediction)
        self._prompt_length = prompt_length

    async def propose(self, tokens: Sequence[int], gamma: int, sampler: Sampler) -> Draft:
        """Its beginning for an answer's beginning, afterwards what follows the longest match."""
        answer = tokens[self._prompt_length :]
        if not answer:
            start = tuple(self._index.tokens[:gamma])
            return Draft(start, self.name, confidences=Match(0, LONGEST_MATCH).confidences(len(start)))
        return self._index.propose(answer, gamma, self.name)

    def close(self) -> None:
        """Nothing to give back."""
