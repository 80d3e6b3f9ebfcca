"""Prompts of every kind that users send, composed from templates and from text that the machine ships."""

from __future__ import annotations

import random
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ConfigDict

_SLOT: Final = re.compile(r"\{(\w+)(?:\.\d+)?\}")
WORDS_IN: Final = "word_in_"
NUMBERS: Final = {"few": (2, 9), "small": (10, 30), "medium": (31, 120), "large": (150, 990), "year": (1890, 2024)}
_TEMPLATES: Final = Path(__file__).with_name("templates.toml")


def read_book() -> dict[str, Any]:
    """templates.toml: weights, templates and pools."""
    return tomllib.loads(_TEMPLATES.read_text(encoding="utf-8"))


class Prompt(BaseModel):
    """One conversation's user turns, in order; the target's answers come between them."""

    model_config = ConfigDict(frozen=True)

    index: int
    kind: str
    turns: tuple[str, ...]
    is_sampled: bool


@dataclass(frozen=True)
class PromptBook:
    """Templates by kind, how often each kind comes, and the pools that fill their slots."""

    templates: Mapping[str, Sequence[tuple[str, ...]]]
    weights: Mapping[str, float]
    pools: Mapping[str, Sequence[str]]

    @staticmethod
    def load(shipped: Mapping[str, Sequence[str]]) -> PromptBook:
        """Our templates with these pools beside their own. A template that wants a pool we lack is left out."""
        book = read_book()
        pools = {**book["pools"], **shipped}
        templates = {kind: _usable(entries, pools) for kind, entries in book["templates"].items()}
        return PromptBook({kind: found for kind, found in templates.items() if found}, book["weights"], pools)

    def compose(self, count: int, seed: int, sampled_share: float) -> Iterator[Prompt]:
        """`count` prompts in random order of kinds: any beginning of them is a fair mixture.

        sampled_share: the part whose answers are to be drawn at random instead of greedily.
        """
        random_ = random.Random(seed)
        kinds = sorted(self.templates)
        weights = [self.weights[kind] for kind in kinds]
        seen: set[tuple[str, ...]] = set()
        index = 0
        # A small book runs out of new prompts: then it repeats some, rather than never ending.
        for attempt in range(20 * count):
            kind = random_.choices(kinds, weights)[0]
            turns = self._fill(random_.choice(self.templates[kind]), random_)
            if turns in seen and attempt < 10 * count:
                continue
            seen.add(turns)
            yield Prompt(index=index, kind=kind, turns=turns, is_sampled=random_.random() < sampled_share)
            index += 1
            if index == count:
                return

    def _fill(self, template: tuple[str, ...], random_: random.Random) -> tuple[str, ...]:
        values: dict[str, str] = {}

        def value(found: re.Match[str]) -> str:
            slot, pool = found[0], found[1]
            if slot not in values:
                values[slot] = self._draw(pool, values, random_)
            return values[slot]

        filled = tuple(_SLOT.sub(value, turn.replace("{{", "\0").replace("}}", "\1")) for turn in template)
        return tuple(turn.replace("\0", "{").replace("\1", "}") for turn in filled)

    def _draw(self, pool: str, values: Mapping[str, str], random_: random.Random) -> str:
        """A value of the pool that this prompt doesn't hold yet, if there is one."""
        if pool in NUMBERS:
            return str(random_.randint(*NUMBERS[pool]))
        if pool.startswith(WORDS_IN):
            passage = values.get(f"{{{pool.removeprefix(WORDS_IN)}}}", "")
            words = [word for word in re.findall(r"[A-Za-z][\w-]+", passage) if len(word) > 5]
            return f'"{random_.choice(words)}"' if words else "this"
        for _ in range(10):
            drawn = random_.choice(self.pools[pool])
            if drawn not in values.values():
                break
        return drawn


def _usable(entries: Sequence[Any], pools: Mapping[str, Sequence[str]]) -> list[tuple[str, ...]]:
    templates = [(entry,) if isinstance(entry, str) else tuple(entry) for entry in entries]
    return [turns for turns in templates if all(_is_known(pool, pools) for pool in slots(turns))]


def slots(turns: Sequence[str]) -> list[str]:
    """The pools that these turns draw from, as often as they do."""
    return [found[1] for turn in turns for found in _SLOT.finditer(turn.replace("{{", "").replace("}}", ""))]


def _is_known(pool: str, pools: Mapping[str, Sequence[str]]) -> bool:
    return pool in NUMBERS or pool.removeprefix(WORDS_IN) in pools
