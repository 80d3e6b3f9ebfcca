"""Where draft tokens come from: the text so far, past answers, a prediction, a head, a small model, or nowhere."""

from __future__ import annotations

from edge_agent.drafters.base import Drafter, NullDrafter
from edge_agent.drafters.chain import ChainDrafter
from edge_agent.drafters.head import HeadDrafter
from edge_agent.drafters.model import ModelDrafter
from edge_agent.drafters.ngram import NgramDrafter, PredictionDrafter
from edge_agent.drafters.pool import AnswerPool, PoolDrafter

__all__ = [
    "AnswerPool",
    "ChainDrafter",
    "Drafter",
    "HeadDrafter",
    "ModelDrafter",
    "NgramDrafter",
    "NullDrafter",
    "PoolDrafter",
    "PredictionDrafter",
]
