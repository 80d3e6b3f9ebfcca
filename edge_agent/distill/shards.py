"""The target's recorded answers on disk: every shard is whole or not there, so that a killed run loses no finished one.

A shard is NNNNN.states.npy, float16 [positions, H], and NNNNN.npz beside it, which is written last and makes it valid.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from shared.models.cache import write_atomically

SHARD_POSITIONS: Final = 1 << 14
"""Positions after which a shard is written: half a minute's work at most is lost by a kill."""


@dataclass(frozen=True)
class Record:
    """One conversation: its tokens, and the target's last hidden state at each (the last token was never fed)."""

    prompt_index: int
    tokens: npt.NDArray[np.int32]  # [n]
    is_answer: npt.NDArray[np.bool_]  # [n]: the target's own choice, not the prompt's
    states: npt.NDArray[np.float16]  # [n - 1, H]

    @property
    def num_answer_tokens(self) -> int:
        return int(self.is_answer.sum())


class ShardFolder:
    """A folder of shards."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)

    def records(self) -> Iterator[Record]:
        """All records, in the order of writing; states stay memory-mapped."""
        for file in self._shards():
            with np.load(file, allow_pickle=False) as shard:
                prompts, lengths = shard["prompts"], shard["lengths"]
                tokens, is_answer = shard["tokens"], shard["is_answer"]
            states = np.load(file.with_suffix(".states.npy"), mmap_mode="r", allow_pickle=False)
            ends = np.cumsum(lengths)
            for number, (prompt, end, length) in enumerate(zip(prompts, ends, lengths, strict=True)):
                place = slice(end - length, end)
                kept = slice(end - length - number, end - number - 1)
                yield Record(int(prompt), tokens[place], is_answer[place], states[kept])

    def write(self, records: Sequence[Record]) -> None:
        """Append one shard."""
        number = 1 + max((int(file.stem) for file in self._shards()), default=-1)
        states = io.BytesIO()
        np.save(states, np.concatenate([record.states for record in records]))
        write_atomically(self.path / f"{number:05}.states.npy", states.getvalue())
        index = io.BytesIO()
        np.savez(
            index,
            prompts=np.array([record.prompt_index for record in records], np.int64),
            lengths=np.array([len(record.tokens) for record in records], np.int64),
            tokens=np.concatenate([record.tokens for record in records]),
            is_answer=np.concatenate([record.is_answer for record in records]),
        )
        write_atomically(self.path / f"{number:05}.npz", index.getvalue())

    def _shards(self) -> list[Path]:
        return sorted(self.path.glob("[0-9]*.npz"))
