"""The acceptance rules are exact."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.acceptance import Draft, choose, common_prefix_length, judge, residual
from shared.sampling import AcceptanceRule, Distribution, Sampler, SamplingParams, draw, filtered_softmax

RULES = list(AcceptanceRule)
NUM_DRAWS = 40_000


def dense(values: Sequence[float]) -> Distribution:
    array = np.array(values, float)
    keep = np.flatnonzero(array)
    return Distribution(keep, array[keep])


def frequencies(
    rule: AcceptanceRule, p: Distribution, q: Distribution, size: int, drawn: int | None = None
) -> np.ndarray:
    """Shares of each id over many seeds, with a draft from q, or always `drawn`, judged against p."""
    counts = np.zeros(size)
    for seed in range(NUM_DRAWS):
        sampler = Sampler(SamplingParams(seed=seed, rule=rule))
        token = draw(q, seed, 5) if drawn is None else drawn
        counts[choose(p, token, q, sampler, 5)] += 1
    return counts / NUM_DRAWS


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("p", "q"),
    [
        ([0.5, 0.3, 0.2], [0.7, 0.2, 0.1]),
        ([0.5, 0.3, 0.2], [0.5, 0.3, 0.2]),
        ([0.0, 0.6, 0.4], [0.9, 0.1, 0.0]),
        ([1.0, 0.0, 0.0], [0.0, 0.5, 0.5]),
    ],
)
def test_output_follows_the_target(rule: AcceptanceRule, p: list[float], q: list[float]) -> None:
    shares = frequencies(rule, dense(p), dense(q), 3)
    assert np.abs(shares - p).sum() / 2 < 0.01


@pytest.mark.parametrize("rule", RULES)
def test_a_draft_that_was_not_drawn_is_one_hot(rule: AcceptanceRule) -> None:
    """An argmax of [.8, .2] judged as if drawn from it would give [.75, .25]; one-hot gives [.6, .4]."""
    shares = frequencies(rule, dense([0.6, 0.4]), Distribution.one_hot(0), 2, drawn=0)
    assert np.abs(shares - [0.6, 0.4]).sum() / 2 < 0.01


@pytest.mark.parametrize(
    "params", [{"top_k": 2}, {"top_p": 0.6}, {"min_p": 0.7}, {"temperature": 0.5, "top_k": 2}, {"temperature": 1.5}]
)
@pytest.mark.parametrize("rule", RULES)
def test_filters_apply_to_both_sides(rule: AcceptanceRule, params: dict[str, float]) -> None:
    """With the draft's raw probabilities in the ratio, top_k=2 would give [.625, .375] instead of [.571, .429]."""
    sampling = SamplingParams(rule=rule, **params)
    p = filtered_softmax(np.log([0.4, 0.3, 0.2, 0.1]), sampling)
    q = filtered_softmax(np.log([0.5, 0.3, 0.1, 0.1]), sampling)
    shares = frequencies(rule, p, q, 4)
    assert np.abs(shares - [p.prob(i) for i in range(4)]).sum() / 2 < 0.01


def test_residual_is_normalised_excess() -> None:
    assert residual(dense([0.5, 0.3, 0.2]), dense([0.7, 0.2, 0.1])).ids.tolist() == [1, 2]
    assert residual(dense([0.5, 0.3, 0.2]), dense([0.7, 0.2, 0.1])).probs.tolist() == pytest.approx([0.5, 0.5])


def test_residual_of_equal_distributions_is_the_target() -> None:
    p = dense([0.5, 0.3, 0.2])
    assert residual(p, p) is p


def test_a_token_the_target_rules_out_is_never_accepted() -> None:
    """Strictly: even a coin of 0 is not under p/q = 0."""
    p, q = dense([0.0, 1.0]), dense([1.0, 0.0])
    for seed in range(1000):
        sampler = Sampler(SamplingParams(seed=seed, rule=AcceptanceRule.REJECTION))
        assert choose(p, 0, q, sampler, 0) == 1


@given(st.integers(0, 2**63), st.lists(st.floats(-6, 6), min_size=2, max_size=30), st.sampled_from(RULES))
def test_equal_distributions_accept_everything(seed: int, logits: list[float], rule: AcceptanceRule) -> None:
    p = filtered_softmax(np.array(logits), SamplingParams())
    sampler = Sampler(SamplingParams(seed=seed, rule=rule))
    token = draw(p, seed, 3)
    assert choose(p, token, p, sampler, 3) == token


def test_a_sequence_of_two_follows_the_joint_distribution() -> None:
    """Two positions of a Markov target, drafted by another: the joint of both tokens is the target's."""
    rng = np.random.default_rng(0)
    p_logits, q_logits = rng.normal(size=(2, 4, 3))
    p_first, q_first = (filtered_softmax(m[3], SamplingParams()) for m in (p_logits, q_logits))
    joint = np.array(
        [
            [p_first.prob(a) * filtered_softmax(p_logits[a], SamplingParams()).prob(b) for b in range(3)]
            for a in range(3)
        ]
    )
    for rule in RULES:
        counts = np.zeros((3, 3))
        for seed in range(NUM_DRAWS):
            sampler = Sampler(SamplingParams(seed=seed, rule=rule))
            first = draw(q_first, seed, 10)
            q_second = filtered_softmax(q_logits[first], SamplingParams())
            second = draw(q_second, seed, 11)
            draft = Draft((first, second), "toy", (q_first, q_second))
            rows = np.stack([p_logits[3], p_logits[first], p_logits[second]])
            out = list(judge(rows, draft, sampler, 10).tokens(draft))
            if len(out) == 1:
                out.append(sampler.draw(p_logits[out[0]], 11))
            counts[out[0], out[1]] += 1
        assert np.abs(counts / NUM_DRAWS - joint).sum() / 2 < 0.015


def test_penalties_see_accepted_drafts_and_forget_rejected_ones() -> None:
    logits = np.tile([1.0, 0.9, 0.0], (4, 1))
    sampler = Sampler(SamplingParams(temperature=0, frequency_penalty=0.2))
    draft = Draft((0, 1, 1), "toy")
    # Penalised one by one: 0 (1.0), then 1 (0.8 against 0.9), then 0 again (0.8 against 0.7): the third is rejected.
    verdict = judge(logits, draft, sampler, 0)
    assert (verdict.accepted, verdict.next_token) == (2, 0)
    for token in verdict.tokens(draft):
        sampler.append(token)
    assert dict(sampler._counts) == {0: 2, 1: 1}


def test_logprobs_come_one_a_committed_token() -> None:
    logits = np.log(np.array([[0.7, 0.3], [0.2, 0.8]]))
    verdict = judge(logits, Draft((0,), "toy"), Sampler(SamplingParams(temperature=0)), 0, num_top_logprobs=1)
    assert [round(float(np.exp(entry.logprob)), 6) for entry in verdict.logprobs] == [0.7, 0.8]
    assert [entry.top[0][0] for entry in verdict.logprobs] == [0, 1]


def test_rows_must_fit_the_draft() -> None:
    with pytest.raises(ValueError, match="need 2 rows"):
        judge(np.zeros((1, 3)), Draft((0,), "toy"), Sampler(SamplingParams()), 0)
    with pytest.raises(ValueError, match="1 draft tokens with 2 distributions"):
        Draft((0,), "toy", (Distribution.one_hot(0),) * 2)


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_common_prefix_length(a: list[int], b: list[int]) -> None:
    length = common_prefix_length(a, b)
    assert a[:length] == b[:length]
    assert length == min(len(a), len(b)) or a[length] != b[length]
