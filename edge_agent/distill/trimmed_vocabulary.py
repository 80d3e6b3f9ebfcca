"""Which ids a head can propose: those that the target's answers are made of."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edge_agent.distill.shards import Record


@dataclass(frozen=True)
class TrimmedVocabulary:
    """ids: ascending. coverage: the part of the answers' tokens that they are."""

    ids: npt.NDArray[np.int32]
    coverage: float


def trim_vocabulary(records: Iterable[Record], vocab_size: int, max_ids: int) -> TrimmedVocabulary:
    """The `max_ids` commonest ids of the answers, then those that only prompts hold, then the lowest ids.

    A byte-pair vocabulary gives its lowest ids to what is commonest in text.
    """
    return extended_vocabulary(np.zeros(0, np.int32), records, vocab_size, max_ids)


def extended_vocabulary(
    ids: npt.NDArray[np.int32], records: Iterable[Record], vocab_size: int, max_ids: int
) -> TrimmedVocabulary:
    """These ids, and as many others as there is room for, chosen as in `trim_vocabulary`."""
    answers, prompts = _counted(records, vocab_size)
    is_given = np.zeros(vocab_size, bool)
    is_given[ids] = True
    ranked = np.lexsort((-prompts, -answers, ~is_given))
    chosen = np.sort(ranked[: max(max_ids, len(ids))]).astype(np.int32)
    return TrimmedVocabulary(chosen, _coverage(chosen, answers))


def _counted(records: Iterable[Record], vocab_size: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """How often each id stands in the answers, and in the prompts."""
    answers, prompts = np.zeros(vocab_size, np.int64), np.zeros(vocab_size, np.int64)
    for record in records:
        answers += np.bincount(record.tokens[record.is_answer], minlength=vocab_size)
        prompts += np.bincount(record.tokens[~record.is_answer], minlength=vocab_size)
    return answers, prompts


def _coverage(ids: npt.NDArray[np.int32], answers: npt.NDArray[np.int64]) -> float:
    return float(answers[ids].sum() / max(1, answers.sum()))
