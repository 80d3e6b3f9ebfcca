"""Recorded answers as batches to train on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from edge_agent.distill.head_module import HeadBatch
from edge_agent.distill.shards import Record
from shared.models.target_embedding import TargetEmbedding


def batches(records: Sequence[Record], batch_positions: int, random: np.random.Generator) -> list[list[Record]]:
    """Records of about one length together, each batch's padded size within `batch_positions`; in random order."""
    shuffled = [records[i] for i in random.permutation(len(records))]
    ordered = sorted(shuffled, key=lambda record: len(record.tokens))
    made: list[list[Record]] = []
    for record in ordered:
        if made and (len(made[-1]) + 1) * len(record.tokens) <= batch_positions:
            made[-1].append(record)
        else:
            made.append([record])
    return [made[i] for i in random.permutation(len(made))]


def is_held_out(record: Record, share: float) -> bool:
    """Whether the record is kept from training. Its prompt's number decides, whatever records are added."""
    return record.prompt_index % max(2, round(1 / share)) == 0


def learned_positions(record: Record, with_prompt: bool) -> np.ndarray:
    """Positions i whose token i + 2 is to be predicted: the answer's, or all of them."""
    learned = np.ones(len(record.tokens) - 2, bool) if with_prompt else record.is_answer[2:]
    return np.flatnonzero(learned)


def to_batch(
    records: Sequence[Record], with_prompt: Sequence[bool], embedding: TargetEmbedding, device: torch.device
) -> HeadBatch:
    """One padded batch; with_prompt: which records' prompts are learned from too."""
    places = [learned_positions(record, whole) for record, whole in zip(records, with_prompt, strict=True)]
    length = max(len(record.tokens) for record in records) - 2
    count = max(map(len, places))
    hidden = records[0].states.shape[1]
    features = np.zeros((len(records), length, hidden), np.float16)
    states = np.zeros((len(records), count, hidden), np.float16)
    embeddings = np.zeros((len(records), length, hidden), np.float32)
    queries = np.zeros((len(records), count), np.int64)
    is_learned = np.zeros((len(records), count), bool)
    for row, (record, place) in enumerate(zip(records, places, strict=True)):
        held = len(record.tokens) - 2
        features[row, :held] = record.states[:held]
        embeddings[row, :held] = embedding.rows(record.tokens[1:-1].tolist())
        queries[row, : len(place)] = place
        is_learned[row, : len(place)] = True
        states[row, : len(place)] = record.states[place + 1]
    arrays = (features, embeddings, queries, is_learned, states)
    return HeadBatch(*(torch.from_numpy(array).to(device) for array in arrays))
