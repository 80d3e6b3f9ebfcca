"""The cost of a round, kept current, and the lengths that are best by it."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_agent.cost_model import CostCurve, CostModel
from edge_agent.gamma_chooser import best_length, curve_mix, expected_tokens, measured_speedup

SMALL = [29.0, 35.0, 43.0, 56.0, 69.0, 79.0, 89.0, 99.0, 109.0]
FLAT = CostCurve((10.0,) * 9)


def test_curve_goes_on_with_its_last_slope() -> None:
    curve = CostCurve((10.0, 12.0, 15.0))
    assert [curve.at(m) for m in (1, 2, 3, 4, 5)] == [10.0, 12.0, 15.0, 18.0, 21.0]
    assert curve.extra(2) == 5.0
    assert CostCurve((10.0,)).at(3) == 30.0
    with pytest.raises(ValueError):
        CostCurve(())
    with pytest.raises(ValueError):
        CostCurve((1.0, float("nan")))


def test_late_rounds_change_nothing() -> None:
    model = CostModel(SMALL)
    rng = random.Random(0)
    for index in range(200):
        m = rng.choice((1, 1, 1, 3, 5))
        late = 8.0 if index % 10 == 0 else 1.0
        model.observe_verify(m, SMALL[m - 1] * late * rng.uniform(0.98, 1.02))
    assert list(model.curve.values) == pytest.approx(SMALL, rel=0.1)


def test_a_slower_clock_moves_all_of_the_curve() -> None:
    model = CostModel(SMALL)
    for _ in range(20):
        model.observe_verify(1, SMALL[0] * 1.6)
    assert list(model.curve.values) == pytest.approx([value * 1.6 for value in SMALL])
    assert model.calibrated_direct == SMALL[0]


def test_a_wrong_shape_is_unlearnt() -> None:
    model = CostModel([29.0, 29.5, 30.0])
    rng = random.Random(0)
    for _ in range(400):
        m = rng.choice((1, 3))
        model.observe_verify(m, SMALL[m - 1])
    assert model.curve.at(3) / model.curve.at(1) == pytest.approx(SMALL[2] / SMALL[0], rel=0.12)


@given(st.lists(st.tuples(st.integers(-2, 20), st.floats(allow_nan=True, allow_infinity=True)), max_size=60))
def test_nonsense_never_breaks_the_curve(samples: list[tuple[int, float]]) -> None:
    model = CostModel(SMALL, {"model": 10.0})
    for positions, cost in samples:
        model.observe_verify(positions, cost)
        model.observe_draft("model", positions, cost)
    values = model.curve.values
    assert all(0 < value < float("inf") for value in values)
    assert all(low <= high for low, high in pairwise(values))
    assert 0 <= model.draft_cost("model") < float("inf")


def test_draft_cost_is_a_median() -> None:
    model = CostModel(SMALL, {"model": 10.0})
    assert model.draft_cost("ngram") == 0.0
    for index in range(15):
        model.observe_draft("model", 2, 200.0 if index == 3 else 24.0)
    assert model.draft_cost("model") == 12.0


def test_expected_tokens_is_the_closed_form() -> None:
    for alpha in (0.0, 0.3, 0.8):
        for gamma in (0, 1, 5):
            closed = (1 - alpha ** (gamma + 1)) / (1 - alpha)
            assert expected_tokens([alpha] * gamma) == pytest.approx(closed)
    assert expected_tokens([1.0] * 4) == 5.0


def test_measured_speedup_is_the_formula() -> None:
    curve = CostCurve(tuple(SMALL))
    assert measured_speedup([0.8] * 3, curve, 0.0) == pytest.approx((1 + 0.8 + 0.64 + 0.512) * 29 / 56)
    assert measured_speedup([], curve, 5.0) == 1.0


def test_free_verification_wants_the_longest_draft() -> None:
    assert best_length([0.5] * 8, FLAT, value=10.0).length == 8


def test_useless_drafts_are_left_unverified() -> None:
    curve = CostCurve(tuple(SMALL))
    assert best_length([0.05] * 8, curve, value=29.0).length == 0
    assert best_length([0.9] * 8, curve, value=29.0, most_extra=0.0).length == 0


def test_loss_is_bounded() -> None:
    curve = CostCurve(tuple(SMALL))
    assert best_length([0.95] * 8, curve, value=29.0, most_extra=15.0).length == 2
    assert best_length([0.95] * 8, curve, value=29.0).length > 4


rates = st.lists(st.floats(0, 1), min_size=0, max_size=8)
curves = st.lists(st.floats(0, 30), min_size=8, max_size=8).map(
    lambda steps: CostCurve(tuple(20.0 + sum(steps[:index]) for index in range(9)))
)


@given(rates, curves, st.floats(0, 20))
def test_best_length_is_the_best_by_trying_all(rates: list[float], curve: CostCurve, draft_cost: float) -> None:
    choice = best_length(rates, curve, value=curve.at(1), draft_cost=draft_cost)

    def gain(length: int) -> float:
        saved = (expected_tokens(rates[:length]) - 1) * curve.at(1)
        return saved - curve.extra(length) - length * draft_cost

    assert 0 <= choice.length <= len(rates)
    assert gain(choice.length) == pytest.approx(max(gain(length) for length in range(len(rates) + 1)), abs=1e-6)


@given(rates, curves, st.integers(0, 7))
def test_likelier_tokens_never_shorten_a_draft(rates: list[float], curve: CostCurve, index: int) -> None:
    better = [1.0 if position == index else rate for position, rate in enumerate(rates)]
    assert best_length(better, curve, value=20.0).gain >= best_length(rates, curve, value=20.0).gain - 1e-9


def test_objective_mixes_time_and_energy() -> None:
    times, joules = CostCurve((1.0, 2.0, 3.0)), CostCurve((1.0, 1.0, 1.0, 1.0))
    assert curve_mix(times, joules, 0.0).values == (1.0, 2.0, 3.0)
    assert curve_mix(times, joules, 1.0).values == (1.0, 1.0, 1.0)
    assert curve_mix(times, joules, 0.5).values == (1.0, 1.5, 2.0)


def test_the_relative_curve_is_the_shape_whatever_the_level() -> None:
    model = CostModel(SMALL)
    for _ in range(20):
        model.observe_verify(1, SMALL[0] * 1.6)
    assert list(model.relative.values) == pytest.approx([value / SMALL[0] for value in SMALL])
