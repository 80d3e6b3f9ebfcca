"""Token ids to text as they come, never sending what would have to be taken back."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence
from typing import Protocol


class TokenBytes(Protocol):
    """What a detokenizer asks of a tokenizer."""

    special_ids: frozenset[int]
    strips_first_space: bool

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that this token adds to a text."""


class IncrementalDetokenizer:
    """One answer's text, token by token.

    `push` returns text that is final: never half a character, never what may still become a stop string. The text of
    all pushes and of `flush`, joined, is `Tokenizer.decode` of all ids up to the first stop string. Where that begins
    does not depend on how text falls into tokens: it is the first to be complete, the longest of those that end there.
    """

    def __init__(self, tokenizer: TokenBytes, stop: Sequence[str] = (), *, continues: bool = False) -> None:
        """`continues` says that other text stands before the answer, so that its leading space is kept."""
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._stops = [_StopMatcher(text) for text in stop if text]
        self._strips_space = tokenizer.strips_first_space and not continues
        self._held = ""
        self._num_returned = 0
        self._num_decoded = 0
        self._token_spans: deque[tuple[int, int]] = deque()
        self.num_returned_tokens = 0
        """Leading tokens whose text has been returned whole; after a stop, those with any part in the returned text."""
        self.stopped = False
        """A stop string was completed: the text before it has been returned, nothing after it will be."""

    def push(self, token_id: int) -> str:
        """Takes the next token, returns the text that became final."""
        if self.stopped:
            return ""
        data = b"" if token_id in self._tokenizer.special_ids else self._tokenizer.token_bytes(token_id)
        if self._strips_space and data:
            data = data.removeprefix(b" ")
            self._strips_space = False
        start = self._num_decoded
        text = self._decoder.decode(data)
        self._num_decoded += len(text)
        # Bytes that the decoder still holds will become one more character at least.
        self._token_spans.append((start, self._num_decoded + bool(self._decoder.getstate()[0])))
        return self._advance(text)

    def flush(self) -> str:
        """The answer has ended: returns what was held back, an unfinished character as U+FFFD."""
        if self.stopped:
            return ""
        final = self._advance(self._decoder.decode(b"", final=True))
        if self.stopped:
            return final
        rest, self._held = self._held, ""
        self._num_returned += len(rest)
        self.num_returned_tokens += len(self._token_spans)
        self._token_spans.clear()
        return final + rest

    def _advance(self, text: str) -> str:
        self._held += text
        for position, character in enumerate(text, start=len(self._held) - len(text) + 1):
            matched = max((stop.length for stop in self._stops if stop.completes(character)), default=0)
            if matched:
                return self._stop_at(position - matched)
        num_safe = len(self._held) - max((stop.num_matched for stop in self._stops), default=0)
        safe, self._held = self._held[:num_safe], self._held[num_safe:]
        self._num_returned += len(safe)
        while self._token_spans and self._token_spans[0][1] <= self._num_returned:
            self._token_spans.popleft()
            self.num_returned_tokens += 1
        return safe

    def _stop_at(self, position: int) -> str:
        self.stopped = True
        text, self._held = self._held[:position], ""
        self._num_returned += len(text)
        self.num_returned_tokens += sum(start < self._num_returned for start, _ in self._token_spans)
        self._token_spans.clear()
        return text


class _StopMatcher:
    """Knuth, Morris and Pratt: how much of the stop string the text so far ends with, in O(1) a character."""

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self.length = len(stop)
        self.num_matched = 0
        self._fallbacks = _fallbacks(stop)

    def completes(self, character: str) -> bool:
        """Takes the next character and tells whether the stop string is complete with it."""
        while self.num_matched and self._stop[self.num_matched] != character:
            self.num_matched = self._fallbacks[self.num_matched - 1]
        if self._stop[self.num_matched] == character:
            self.num_matched += 1
        return self.num_matched == self.length


def _fallbacks(stop: str) -> list[int]:
    """For each prefix, the length of its longest proper prefix that is also its suffix."""
    fallbacks = [0] * len(stop)
    matched = 0
    for position in range(1, len(stop)):
        while matched and stop[position] != stop[matched]:
            matched = fallbacks[matched - 1]
        if stop[position] == stop[matched]:
            matched += 1
        fallbacks[position] = matched
    return fallbacks
