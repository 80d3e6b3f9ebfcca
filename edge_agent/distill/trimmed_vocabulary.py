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
    answers, prompts = _counted(records, vocab_size)
    ids = np.sort(np.lexsort((-prompts, -answers))[:max_ids]).astype(np.int32)
    return TrimmedVocabulary(ids, _coverage(ids, answers))


def given_vocabulary(ids: npt.NDArray[np.int32], records: Iterable[Record], vocab_size: int) -> TrimmedVocabulary:
    """These ids, and the part of the answers that they are."""
    answers, _ = _counted(records, vocab_size)
    return TrimmedVocabulary(ids, _coverage(ids, answers))


def _counted(records: Iterable[Record], vocab_size: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """How often each id stands in the answers, and in the prompts."""
    answers, prompts = np.zeros(vocab_size, np.int64), np.zeros(vocab_size, np.int64)
    for record in records:
        answers += np.bincount(record.tokens[record.is_answer], minlength=vocab_size)
        prompts += np.bincount(record.tokens[~record.is_answer], minlength=vocab_size)
    return answers, prompts


def _coverage(ids: npt.NDArray[np.int32], answers: npt.NDArray[np.int64]) -> float:
    return float(answers[ids].sum() / max(1, answers.sum()))
