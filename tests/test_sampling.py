"""The distribution a token is drawn from, and the draw."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from shared.sampling import (
    Distribution,
    Noise,
    Sampler,
    SamplingParams,
    _nucleus,
    draw,
    filtered_softmax,
    likelihood,
    top_logprobs,
    uniform,
)

LOGITS = np.log(np.array([0.4, 0.3, 0.2, 0.1]))


def probs(params: SamplingParams, logits: np.ndarray = LOGITS) -> list[float]:
    distribution = filtered_softmax(logits, params)
    return [round(distribution.prob(i), 6) for i in range(len(logits))]


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, [0.4, 0.3, 0.2, 0.1]),
        ({"top_k": 2}, [0.571429, 0.428571, 0, 0]),
        ({"top_k": 9_999_999}, [0.4, 0.3, 0.2, 0.1]),
        ({"top_p": 0.4}, [1, 0, 0, 0]),
        ({"top_p": 0.41}, [0.571429, 0.428571, 0, 0]),
        ({"top_p": 1e-9}, [1, 0, 0, 0]),
        ({"min_p": 0.5}, [0.444444, 0.333333, 0.222222, 0]),
        ({"min_p": 0.6}, [0.571429, 0.428571, 0, 0]),
        ({"temperature": 0.5}, [0.533333, 0.3, 0.133333, 0.033333]),
        ({"top_k": 3, "top_p": 0.7}, [0.571429, 0.428571, 0, 0]),
    ],
)
def test_filters_leave_the_right_probabilities(params: dict[str, float], expected: list[float]) -> None:
    assert probs(SamplingParams(**params)) == pytest.approx(expected, abs=1e-6)


def test_a_tie_at_the_edge_of_top_k_is_cut_by_id() -> None:
    assert probs(SamplingParams(top_k=2), np.zeros(4)) == [0.5, 0.5, 0, 0]


@pytest.mark.parametrize("size", [3, 255, 256, 257, 9000])
@pytest.mark.parametrize("levels", [1, 5, 100_000])
def test_a_nucleus_is_that_of_all_ids_sorted(size: int, levels: int) -> None:
    """Whether a few ids hold it or most, with and without ties at its edge."""
    weights = np.exp(np.random.default_rng(size).integers(0, levels, size) * (12.0 / levels))
    for top_p in (1e-9, 0.1, 0.5, 0.95, 0.999999, 1 - 1e-16):
        order = np.argsort(-weights, kind="stable")
        share = np.cumsum(weights[order]) / weights.sum()
        expected = np.sort(order[: int(np.searchsorted(share, top_p)) + 1])
        assert _nucleus(weights, top_p).tolist() == expected.tolist()


@pytest.mark.parametrize("temperature", [0.0, 1e-45, 1e-6, 9e-6])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    sampler = Sampler(SamplingParams(temperature=temperature, seed=3))
    assert sampler.draw(np.array([1.0, 1.0 + 1e-12, 0.0]), position=0) == 1


@pytest.mark.parametrize("temperature", [1e-4, 1e-3])
def test_a_small_temperature_stays_finite(temperature: float) -> None:
    distribution = filtered_softmax(np.array([0.0, 100.0, -1e30]), SamplingParams(temperature=temperature))
    assert np.isfinite(distribution.probs).all()
    assert distribution.prob(1) == 1.0


@pytest.mark.parametrize(
    "bad", [{"temperature": math.nan}, {"temperature": -1}, {"top_p": 0}, {"top_p": 1.1}, {"top_k": -1}, {"seed": -1}]
)
def test_parameters_out_of_range_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        SamplingParams(**bad)


def test_penalties_count_the_answer_and_the_repetition_penalty_the_prompt_too() -> None:
    sampler = Sampler(
        SamplingParams(temperature=0, presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=2.0),
        prompt=[0],
        generated=[1, 1],
    )
    adjusted = sampler._adjust(np.array([2.0, 2.0, 2.0]))
    assert adjusted.tolist() == [1.0, 2.0 / 2.0 - 0.5 - 0.5, 2.0]
    assert sampler._adjust(np.array([-1.0, 0.0, 0.0])).tolist()[0] == -2.0


def test_logit_bias_and_min_tokens_change_the_choice() -> None:
    biased = Sampler(SamplingParams(temperature=0, logit_bias={2: 100.0}))
    assert biased.draw(LOGITS, 0) == 2
    banned = Sampler(SamplingParams(temperature=0, min_tokens=1), stop_ids=[0])
    assert banned.draw(LOGITS, 0) == 1
    banned.append(1)
    assert banned.draw(LOGITS, 0) == 0


def test_a_fork_leaves_the_original_alone() -> None:
    sampler = Sampler(SamplingParams(temperature=0, frequency_penalty=2.0))
    fork = sampler.fork()
    fork.append(0)
    assert fork.draw(LOGITS, 0) == 1
    assert sampler.draw(LOGITS, 0) == 0


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**31), st.sampled_from(Noise))
def test_noise_depends_on_its_key_alone(seed: int, position: int, noise: Noise) -> None:
    ids = np.array([5, 9, 1000], np.int64)
    whole = uniform(seed, position, ids, noise)
    assert (whole > 0).all()
    assert (whole < 1).all()
    assert uniform(seed, position, ids[1:2], noise)[0] == whole[1]


def test_noise_is_uniform_and_uncorrelated_over_every_key() -> None:
    ids = np.arange(200_000)
    for values in (
        uniform(1, 2, ids),
        np.array([uniform(seed, 0, np.array([7]))[0] for seed in range(20_000)]),
        np.array([uniform(0, position, np.array([7]))[0] for position in range(20_000)]),
    ):
        count = len(values)
        assert abs(values.mean() - 0.5) < 4 * math.sqrt(1 / 12 / count)
        histogram = np.histogram(values, 20, (0, 1))[0]
        assert ((histogram - count / 20) ** 2 / (count / 20)).sum() < 60  # chi-square, 19 degrees: p < 1e-5
        assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 4 / math.sqrt(count)
    streams = [uniform(1, 2, ids, noise) for noise in Noise]
    assert abs(np.corrcoef(streams)[np.triu_indices(len(streams), 1)]).max() < 4 / math.sqrt(len(ids))


@given(st.integers(0, 2**63), st.lists(st.floats(-8, 8), min_size=2, max_size=40))
def test_the_draw_is_the_gumbel_argmax(seed: int, logits: list[float]) -> None:
    distribution = filtered_softmax(np.array(logits), SamplingParams())
    noise = -np.log(-np.log(uniform(seed, 11, distribution.ids)))
    assert draw(distribution, seed, 11) == distribution.ids[np.argmax(np.log(distribution.probs) + noise)]


def test_draws_follow_the_distribution() -> None:
    distribution = filtered_softmax(LOGITS, SamplingParams())
    drawn = np.bincount([draw(distribution, 1, position) for position in range(40_000)], minlength=4) / 40_000
    assert np.abs(drawn - [0.4, 0.3, 0.2, 0.1]).sum() / 2 < 0.01


def test_one_hot_and_absent_ids() -> None:
    assert Distribution.one_hot(3).prob(3) == 1.0
    assert Distribution.one_hot(3).prob(2) == Distribution.one_hot(3).prob(4) == 0.0


def test_top_logprobs_are_of_the_raw_target_and_ordered() -> None:
    logprob, top = top_logprobs(LOGITS, chosen=3, count=2)
    assert logprob == pytest.approx(math.log(0.1))
    assert [(i, round(math.exp(value), 6)) for i, value in top] == [(0, 0.4), (1, 0.3)]
    assert top_logprobs(LOGITS, chosen=3, count=0)[1] == []


@pytest.mark.parametrize("kind", [np.float32, np.float16])
def test_likelihood_is_the_softmax_before_filters(kind: type) -> None:
    logits = np.array([1.0, 3.0, -2.0, 90.0], kind)
    expected = np.exp(logits.astype(np.float64) - 90.0)
    for token in range(len(logits)):
        assert likelihood(logits, token) == pytest.approx((expected / expected.sum())[token], abs=1e-6)
