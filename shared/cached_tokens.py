"""Which tokens a cache holds, and how it is rewound."""

from __future__ import annotations

from collections.abc import Sequence


class CachedTokens:
    """The tokens of one sequence's cache. What lies behind the last one is stale and will be written over."""

    def __init__(self, context_length: int) -> None:
        self._context_length = context_length
        self._tokens: list[int] = []

    @property
    def context_length(self) -> int:
        """Most tokens that the cache can hold."""
        return self._context_length

    @property
    def tokens(self) -> Sequence[int]:
        """The tokens in the cache, in order."""
        return self._tokens

    def truncate(self, length: int) -> None:
        """Forget every token after the first `length`.

        Raises:
            ValueError: `length` is negative or more than the cache holds; nothing was forgotten.
        """
        if not 0 <= length <= len(self._tokens):
            raise ValueError(f"length must be in 0..{len(self._tokens)}, got {length}")
        del self._tokens[length:]
