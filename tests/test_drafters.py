"""Look-ups, the draft model and the chain of them: what they propose, how sure they are, and when they stop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from edge_agent.drafters import ChainDrafter, Drafter, ModelDrafter, NgramDrafter, PredictionDrafter
from edge_agent.drafters.base import Unpriced
from edge_agent.drafters.ngram import BOUNDARY, LONGEST_MATCH, NgramIndex
from shared.acceptance import Draft
from shared.inference_thread import InferenceThread
from shared.sampling import Sampler, SamplingParams
from tests.fakes import TableLM


def proposed(drafter: Drafter, tokens: Sequence[int], gamma: int = 4, temperature: float = 0.0) -> Draft:
    return asyncio.run(drafter.propose(tokens, gamma, Sampler(SamplingParams(temperature=temperature, seed=1))))


def index(tokens: Sequence[int], shortest: int = 1) -> NgramIndex:
    made = NgramIndex(shortest)
    made.extend(tokens)
    return made


def test_the_latest_place_of_the_longest_match_is_taken() -> None:
    text = [1, 2, 3, 9, 8, 2, 3, 7, 7, 5, 3, 4]
    assert index(text).propose([1, 2, 3], 2, "x").tokens == (9, 8)
    assert index(text).propose([6, 2, 3], 2, "x").tokens == (7, 7)
    assert index(text).propose([6, 6, 3], 2, "x").tokens == (4,)
    assert index(text, shortest=2).propose([6, 6, 3], 2, "x").tokens == ()
    assert index(text).propose([6], 2, "x").tokens == ()


def test_a_match_is_followed_back_and_grows_surer_with_each_token() -> None:
    text = list(range(40))
    for length in (1, 3, 6, 30):
        match = index(text).lookup([99, *text[31 - length : 31]])
        assert match is not None
        assert (match.start, match.length) == (31, min(length, LONGEST_MATCH))
    confidences = index(text).propose([5], 6, "x").confidences
    assert list(confidences) == sorted(confidences)
    assert confidences[0] < confidences[1]


def test_a_successor_that_changed_is_believed_less() -> None:
    once, split = index([1, 2, 3, 4]), index([1, 2, 3, 1, 2, 4])
    assert split.propose([1, 2], 2, "x").confidences[0] < once.propose([1, 2], 2, "x").confidences[0]
    settled = index([1, 2, 3, 1, 2, 4, 1, 2, 4])
    assert settled.propose([1, 2], 1, "x").confidences == once.propose([1, 2], 1, "x").confidences


def test_no_match_reaches_over_a_boundary() -> None:
    made = index([1, 2, BOUNDARY, 3, 4, 5])
    assert made.propose([1, 2], 4, "x").tokens == ()
    assert made.propose([1], 4, "x").tokens == (2,)
    match = made.lookup([1, 2, 3, 4])
    assert match is not None
    assert match.length == 2


def test_growing_token_by_token_is_the_same_as_at_once() -> None:
    text = np.random.default_rng(0).integers(0, 5, 200).tolist()
    grown, drafter = NgramIndex(), NgramDrafter(shortest=1)
    for end in range(1, len(text)):
        grown.extend(text[end - 1 : end])
        draft = index(text[:end]).propose(text[:end], 4, "ngram")
        assert grown.propose(text[:end], 4, "ngram") == draft
        assert proposed(drafter, text[:end]) == draft


def test_a_prediction_is_followed_from_its_beginning() -> None:
    drafter = PredictionDrafter((5, 6, 7, 8, 9), prompt_length=2)
    assert proposed(drafter, [1, 2], 3).tokens == (5, 6, 7)
    assert proposed(drafter, [1, 2, 5, 6], 3).tokens == (7, 8, 9)
    assert proposed(drafter, [1, 2, 4], 3).tokens == ()


class Prices(Unpriced):
    """Promises and gains by drafter; drafts go on for `most` tokens."""

    def __init__(self, promises: dict[str, float], gains: dict[str, float], most: int = 8) -> None:
        self._promises, self._gains, self._most = promises, gains, most
        self.seen: list[str] = []

    def promise(self, drafter: str) -> float:
        return self._promises[drafter]

    def gain(self, draft: Draft) -> float:
        self.seen.append(draft.drafter)
        return self._gains[draft.drafter]

    def go_on(self, drafter: str, confidences: Sequence[float]) -> bool:
        return len(confidences) < self._most


class Fixed:
    """Always proposes its own number."""

    def __init__(self, name: str, token: int) -> None:
        self.name = name
        self._token = token

    async def propose(self, tokens: Sequence[int], gamma: int, sampler: Sampler) -> Draft:
        return Draft((self._token,) * gamma, self.name)

    def close(self) -> None:
        """Nothing to give back."""


@pytest.mark.parametrize(
    ("promise", "gains", "seen", "taken"),
    [
        (0.3, {"a": 0.5, "b": 0.9}, ["a"], 1),  # b promises less than what is there
        (0.7, {"a": 0.5, "b": 0.9}, ["a", "b"], 2),
        (0.7, {"a": 0.5, "b": 0.2}, ["a", "b"], 1),  # b disappoints
        (0.7, {"a": 0.0, "b": 0.0}, ["a", "b"], 1),  # nothing is worth much: whoever trims sees the first
    ],
)
def test_the_chain_asks_while_more_is_promised_and_takes_the_best(
    promise: float, gains: dict[str, float], seen: list[str], taken: int
) -> None:
    prices = Prices({"a": float("inf"), "b": promise}, gains)
    draft = proposed(ChainDrafter([Fixed("a", 1), Fixed("b", 2)], prices), [0])
    assert prices.seen == seen
    assert draft.tokens[0] == taken


def draw(temperature: float, most: int = 8) -> tuple[Draft, TableLM]:
    async def drawn() -> Draft:
        thread = InferenceThread()
        try:
            drafter = ModelDrafter(lm, thread, Prices({}, {}, most))
            return await drafter.propose([1, 2, 3], 6, Sampler(SamplingParams(temperature=temperature, seed=1)))
        finally:
            thread.stop()

    lm = TableLM(16, 3)
    return asyncio.run(drawn()), lm


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_models_confidence_is_the_probability_it_gave_its_token(temperature: float) -> None:
    draft, lm = draw(temperature)
    context = [1, 2, 3]
    for token, confidence in zip(draft.tokens, draft.confidences, strict=True):
        weights = np.exp(lm.logits_after(context))
        assert confidence == pytest.approx(weights[token] / weights.sum(), rel=1e-5)
        context.append(token)
    assert len(draft) == 6


def test_a_draft_model_pays_for_no_token_that_is_not_worth_it() -> None:
    draft, lm = draw(0.0, most=2)
    assert len(draft) == 2
    assert lm.num_forward_calls == 2
