"""What verified drafts teach about the next ones."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_agent.acceptance_window import AcceptancePrior, AcceptanceWindow
from shared.acceptance import Draft


def draft(length: int, confidence: float = 0.6, drafter: str = "ngram") -> Draft:
    return Draft((7,) * length, drafter, confidences=(confidence,) * length)


def teach(window: AcceptanceWindow, rate: float, rounds: int, length: int = 4, confidence: float = 0.6) -> None:
    rng = random.Random(1)
    for _ in range(rounds):
        accepted = 0
        while accepted < length and rng.random() < rate:
            accepted += 1
        window.add(draft(length, confidence), accepted)


def test_starts_from_the_drafters_own_confidence() -> None:
    window = AcceptanceWindow(AcceptancePrior())
    assert window.rates(draft(3, 0.75)) == [0.75] * 3
    assert window.rates(Draft((1, 2), "ngram")) == [0.5, 0.5]
    assert window.acceptance_rate is None


def test_rounds_without_a_draft_are_no_samples() -> None:
    window = AcceptanceWindow(AcceptancePrior())
    for _ in range(1000):
        window.add(Draft(), 0)
    assert window.rates(draft(3)) == [0.6] * 3
    assert window.acceptance_rate is None


@pytest.mark.parametrize("rate", [0.05, 0.5, 0.95])
def test_converges_to_what_is_accepted(rate: float) -> None:
    window = AcceptanceWindow(AcceptancePrior())
    teach(window, rate, 400)
    assert window.rates(draft(1))[0] == pytest.approx(rate, abs=0.12)


def test_two_rejections_are_not_enough_to_give_up() -> None:
    window = AcceptanceWindow(AcceptancePrior())
    for _ in range(2):
        window.add(draft(1, 0.75), 0)
    assert window.rates(draft(1, 0.75))[0] > 0.35


def test_tokens_after_the_first_rejection_tell_nothing() -> None:
    prior = AcceptancePrior()
    window = AcceptanceWindow(prior)
    for _ in range(200):
        window.add(draft(4), 1)
    rates = window.rates(draft(4))
    assert rates[0] > 0.9
    assert rates[1] < 0.1
    # Position 2 was never judged: it is believed as far as the drafter was found honest, no further.
    assert rates[2] == pytest.approx(0.6 * prior.honesty("ngram"))


def test_confidences_are_learnt_apart() -> None:
    window = AcceptanceWindow(AcceptancePrior())
    teach(window, 0.9, 200, confidence=0.77)
    teach(window, 0.1, 200, confidence=0.57)
    assert window.rates(draft(1, 0.77))[0] > 0.8
    assert window.rates(draft(1, 0.57))[0] < 0.2


def test_a_drafter_that_boasts_is_believed_less_everywhere() -> None:
    prior = AcceptancePrior()
    teach(AcceptanceWindow(prior), 0.0, 100, confidence=0.6)
    assert AcceptanceWindow(prior).rates(draft(1, 0.9))[0] < 0.3
    assert AcceptanceWindow(prior).rates(draft(1, 0.9, "model"))[0] == 0.9


def test_a_text_that_changes_is_noticed_and_a_new_request_starts_afresh() -> None:
    prior = AcceptancePrior()
    window = AcceptanceWindow(prior)
    teach(window, 0.95, 100)
    teach(window, 0.0, 60)
    assert window.rates(draft(1))[0] < 0.3
    teach(window, 0.95, 100)
    assert window.rates(draft(1))[0] > 0.7
    fresh = AcceptanceWindow(prior)
    assert fresh.acceptance_rate is None
    assert fresh.rates(draft(1)) == AcceptanceWindow(prior).rates(draft(1))


@given(st.lists(st.tuples(st.integers(1, 8), st.integers(0, 8), st.floats(0, 1)), max_size=60))
def test_rates_are_probabilities(rounds: list[tuple[int, int, float]]) -> None:
    window = AcceptanceWindow(AcceptancePrior())
    for length, accepted, confidence in rounds:
        window.add(draft(length, confidence), min(length, accepted))
    for rate in window.rates(draft(8, 0.6)) + window.typical_rates("ngram", 8, 0.5):
        assert 0.0 <= rate <= 1.0
