"""How good a head is, on the files that ship: acceptance by position and category, and what a step of it costs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Final

import numpy as np

from edge_agent.distill.prompts import Prompt
from edge_agent.distill.shards import Record
from shared.errors import ConfigError
from shared.models.head import open_head
from shared.models.target_embedding import TargetEmbedding
from shared.onnx_head import OnnxHead, OnnxHeadCache
from shared.onnx_lm import OnnxModel

DEPTH: Final = 3
COST_CONTEXT: Final = 200
COST_REPEATS: Final = 15


@dataclass
class Acceptance:
    """Of each draft position: how often it was reached (those before it were right), and how often it was right."""

    reached: list[int] = field(default_factory=lambda: [0] * DEPTH)
    accepted: list[int] = field(default_factory=lambda: [0] * DEPTH)

    def rate(self, position: int) -> float:
        """Acceptance at a position, from 0, given those before it; 0 where it was never reached."""
        return self.accepted[position] / max(1, self.reached[position])

    def rates(self) -> list[float]:
        """All positions'."""
        return [self.rate(position) for position in range(DEPTH)]


def mean_rates(by_category: Mapping[str, Acceptance]) -> list[float]:
    """The mean over categories, each counting alike."""
    return [fmean(found.rate(position) for found in by_category.values()) for position in range(DEPTH)]


def read_prompts(file: Path) -> list[Prompt]:
    """Prompts of a file with an object a line: `category`, `turns`.

    Raises:
        ConfigError: it can't be read as that.
    """
    try:
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        return [
            Prompt(index=index, kind=str(line["category"]), turns=tuple(line["turns"]), is_sampled=False)
            for index, line in enumerate(lines)
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} holds no prompts, one object a line with category and turns: {error}") from error


def measure_acceptance(
    head_directory: Path,
    target: Path,
    records: Iterable[Record],
    kind_of: Callable[[Record], str],
    *,
    num_threads: int,
    context_length: int,
) -> dict[str, Acceptance]:
    """Acceptance by kind, of greedy drafts at every position of recorded greedy answers."""
    head = OnnxHead(
        open_head(head_directory, target=target),
        TargetEmbedding(target),
        context_length=context_length,
        num_threads=num_threads,
    )
    found: dict[str, Acceptance] = {}
    for record in records:
        _count(head.new_cache(), record, found.setdefault(kind_of(record), Acceptance()))
    return dict(sorted(found.items()))


def _count(cache: OnnxHeadCache, record: Record, found: Acceptance) -> None:
    """Draft after every token of the answers but the last, and compare with what the target went on with."""
    tokens = [int(token) for token in record.tokens]
    features = record.states.astype(np.float32)
    for known in range(2, len(tokens)):
        if not record.is_answer[known - 1] or not record.is_answer[known]:
            continue
        start = len(cache.tokens)
        output = cache.forward(tokens[start:known], features[max(start, 1) - 1 : known - 1])
        for position in range(DEPTH):
            place = known + position
            if place >= len(tokens) or not record.is_answer[place]:
                break
            found.reached[position] += 1
            drafted = int(output.logits.argmax())
            if drafted != tokens[place]:
                break
            found.accepted[position] += 1
            if position + 1 < DEPTH:
                output = cache.forward([drafted], output.features)
        cache.truncate(known)


def measure_cost(head_directory: Path, target: Path, num_threads: int) -> float:
    """A step of the head over a pass of the target for one token; medians, interleaved."""
    model = OnnxModel(target, context_length=2 * COST_CONTEXT, num_threads=num_threads)
    embedding = TargetEmbedding(target)
    head = OnnxHead(open_head(head_directory), embedding, context_length=2 * COST_CONTEXT, num_threads=num_threads)
    lm, cache = model.new_cache(), head.new_cache()
    tokens = [index % 1000 for index in range(COST_CONTEXT)]
    lm.forward(tokens, 0)
    feature = np.ones((1, head.manifest.feature_size), np.float32)
    cache.forward(tokens, np.repeat(feature, COST_CONTEXT - 1, axis=0))
    steps, passes = [], []
    for _ in range(COST_REPEATS):
        passes.append(_seconds(lambda: lm.forward([1], 1)))
        steps.append(_seconds(lambda: cache.forward([1], feature)))
        lm.truncate(COST_CONTEXT)
        cache.truncate(COST_CONTEXT)
    return median(steps) / median(passes)


def _seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started
