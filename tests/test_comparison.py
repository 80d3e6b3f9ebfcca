"""Whether two answers agree, part by a near-tie, or part for no good reason."""

from __future__ import annotations

import math

import numpy as np
import pytest

from edge_agent.comparison import NOISE_FLOOR, Outcome, compare
from edge_agent.round import Origin, TokenEvent
from shared.acceptance import TokenLogprobs
from shared.sampling import Distribution, SamplingParams, draw, uniform

GREEDY = SamplingParams(temperature=0)


def event(position: int, token: int, **logprobs: float) -> TokenEvent:
    """A token with log probabilities by id: t7=-0.1."""
    top = tuple((int(name[1:]), value) for name, value in logprobs.items())
    known = TokenLogprobs(dict(top)[token], top) if top else None
    return TokenEvent(position, token, Origin.TARGET, known)


def test_equal_answers_are_equal_without_any_log_probabilities() -> None:
    answer = [event(0, 7), event(1, 8)]
    assert compare(answer, list(answer), GREEDY).outcome is Outcome.EQUAL


def test_a_gap_within_twice_the_rounding_is_a_near_tie() -> None:
    first = [event(0, 7, t7=-0.50), event(1, 8, t8=-0.60, t9=-0.95)]
    second = [event(0, 7, t7=-0.70), event(1, 9, t9=-0.60, t8=-0.62)]
    found = compare(first, second, GREEDY)
    assert found.outcome is Outcome.NEAR_TIE
    assert found.position == 1
    assert found.gap == pytest.approx(0.35)
    assert found.noise == pytest.approx(0.20)


def test_a_larger_gap_is_no_near_tie() -> None:
    first = [event(0, 7, t7=-0.50), event(1, 8, t8=-0.60, t9=-1.10)]
    second = [event(0, 7, t7=-0.70), event(1, 9, t9=-0.60, t8=-0.62)]
    assert compare(first, second, GREEDY).outcome is Outcome.PARTED


def test_rounding_has_a_floor_where_little_text_is_shared() -> None:
    gap = 2 * NOISE_FLOOR
    near = [event(0, 8, t8=-0.6, t9=-0.6 - gap + 1e-9)]
    far = [event(0, 8, t8=-0.6, t9=-0.6 - gap - 1e-6)]
    other = [event(0, 9, t9=-0.6)]
    assert compare(near, other, GREEDY).outcome is Outcome.NEAR_TIE
    assert compare(far, other, GREEDY).outcome is Outcome.PARTED


def test_a_token_that_the_target_did_not_even_list_is_no_near_tie() -> None:
    found = compare([event(0, 8, t8=-0.1, t5=-3.0)], [event(0, 9, t9=-0.1)], GREEDY)
    assert found.outcome is Outcome.PARTED
    assert found.gap is None


def test_an_answer_that_ends_early_has_parted() -> None:
    found = compare([event(0, 7)], [event(0, 7), event(1, 8)], GREEDY)
    assert (found.outcome, found.position) == (Outcome.PARTED, 1)


def test_the_noise_of_the_draw_counts_where_tokens_are_drawn() -> None:
    """Two tokens far apart in probability can tie once the noise is added; two near ones need not."""
    params = SamplingParams(temperature=1.0, seed=3)
    probs = {1: 0.7, 2: 0.3}
    logprobs = {f"t{token}": math.log(p) for token, p in probs.items()}
    distribution = Distribution(np.array([1, 2]), np.array([0.7, 0.3]))
    for position in range(50):
        winner = draw(distribution, params.seed, position)
        loser = 3 - winner
        found = compare([event(position, winner, **logprobs)], [event(position, loser, **logprobs)], params)
        assert found.gap is not None
        # The draw takes the smallest -log(u) / p: how far the loser was behind, in nats.
        u = dict(zip((1, 2), uniform(params.seed, position, np.array([1, 2])), strict=True))
        scores = {token: -math.log(u[token]) / p for token, p in probs.items()}
        assert found.gap == pytest.approx(math.log(scores[loser] / scores[winner]))
        assert found.gap > 0
