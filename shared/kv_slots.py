"""Caches that outlive a request: the next one that begins alike starts where they agree."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

from shared.acceptance import common_prefix_length


class Cache(Protocol):
    """What a model keeps of one sequence."""

    @property
    def tokens(self) -> Sequence[int]:
        """The tokens it holds."""

    def truncate(self, length: int) -> None:
        """Forget every token after the first `length`."""


LM = TypeVar("LM", bound=Cache)


class SlotPool(Generic[LM]):
    """At most `max_slots` caches of one model. Not thread-safe: it belongs to the event loop."""

    def __init__(self, new_cache: Callable[[], LM], max_slots: int) -> None:
        if max_slots < 1:
            raise ValueError(f"max_slots must be at least 1, got {max_slots}")
        self._new_cache = new_cache
        self._max_slots = max_slots
        self._free: list[LM] = []  # Least recently used first.
        self._taken: list[LM] = []

    @property
    def num_cached_tokens(self) -> int:
        """Tokens in all slots, taken or free."""
        return sum(len(lm.tokens) for lm in (*self._free, *self._taken))

    def acquire(self, tokens: Sequence[int]) -> LM:
        """The free slot with the longest common prefix that is worth taking, or a new one while there is room, else the
        least recently used.

        It comes truncated to what it shares with `tokens`.

        Raises:
            LookupError: every slot is taken; admission has to keep requests within `max_slots`.
        """
        has_room = len(self._free) + len(self._taken) < self._max_slots
        shared = {index: common_prefix_length(lm.tokens, tokens) for index, lm in enumerate(self._free)}
        worthy = [index for index in shared if _worth_keeping(shared[index], len(self._free[index].tokens), has_room)]
        if worthy:
            lm = self._free.pop(max(worthy, key=shared.__getitem__))
        elif has_room:
            lm = self._new_cache()
        elif self._free:
            lm = self._free.pop(0)
        else:
            raise LookupError(f"all {self._max_slots} cache slots are taken")
        self._taken.append(lm)
        lm.truncate(common_prefix_length(lm.tokens, tokens))
        return lm

    @contextmanager
    def slot(self, tokens: Sequence[int]) -> Iterator[LM]:
        """A cache for as long as the block lasts; see `acquire`."""
        lm = self.acquire(tokens)
        try:
            yield lm
        finally:
            self.release(lm)

    def forget(self) -> None:
        """Empty the free slots: the next request reads its prompt from the first token on."""
        for lm in self._free:
            lm.truncate(0)

    def release(self, lm: LM) -> None:
        """Give a slot back; its tokens stay for reuse."""
        self._taken.remove(lm)
        self._free.append(lm)


def _worth_keeping(shared: int, held: int, has_room: bool) -> bool:
    """Whether to take a slot that shares `shared` of its `held` tokens.

    While there is room a slot that would lose more than it gives is left for whoever continues it.
    """
    return shared > 0 and (not has_room or shared * 2 >= held)
