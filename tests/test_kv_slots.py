"""Which cache a request gets: the one that spares it the most, and never one that another needs more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.kv_slots import SlotPool
from tests.fuzzing import examples


@dataclass(eq=False)
class Held:
    """A cache that is nothing but its tokens."""

    tokens: list[int] = field(default_factory=list)

    def truncate(self, length: int) -> None:
        del self.tokens[length:]


def filled(pool: SlotPool[Held], *contents: Sequence[int]) -> list[Held]:
    """Caches that held these tokens at once and are free now, the first one released first."""
    caches = [pool.acquire([-1 - number]) for number in range(len(contents))]
    for cache, tokens in zip(caches, contents, strict=True):
        cache.tokens = list(tokens)
        pool.release(cache)
    return caches


def test_who_goes_on_gets_its_own_cache_though_another_shares_as_much() -> None:
    """Two answers to one prompt: the other is longer, and agrees with what this one has only just said."""
    pool = SlotPool(Held, 4)
    prompt = list(range(30))
    own, _other = filled(pool, prompt, [*prompt, *range(100, 148)])
    lm = pool.acquire([*prompt, 100])
    assert lm is own
    assert lm.tokens == prompt


def test_a_long_cache_is_left_to_whoever_continues_it_while_there_is_room() -> None:
    pool = SlotPool(Held, 3)
    [long] = filled(pool, range(100))
    assert pool.acquire([*range(30), 999]) is not long
    assert pool.acquire([*range(60), 999]) is long
    assert long.tokens == list(range(60))


def test_without_room_the_most_shared_goes_and_else_the_oldest() -> None:
    pool = SlotPool(Held, 2)
    oldest, newest = filled(pool, [1, 2, 3], range(10, 60))
    assert pool.acquire([10, 11, 99]) is newest
    assert pool.acquire([7]) is oldest
    assert oldest.tokens == []
    with pytest.raises(LookupError, match="all 2"):
        pool.acquire([1])


@settings(**examples(200))
@given(
    contents=st.lists(st.lists(st.integers(0, 2), max_size=8), max_size=4),
    tokens=st.lists(st.integers(0, 2), max_size=10),
)
def test_no_free_cache_that_the_tokens_continue_is_passed_over(contents: list[list[int]], tokens: list[int]) -> None:
    """With room or without: what is chosen spares at least as much as any cache that is a prefix of the tokens."""
    pool = SlotPool(Held, 5)
    filled(pool, *contents)
    continued = [len(held) for held in contents if held and held == tokens[: len(held)]]
    assert len(pool.acquire(tokens).tokens) >= max(continued, default=0)
