"""A Monte Carlo of speculative rounds by the real acceptance rule, with the closed form beside it.

A round draws gamma draft tokens from q, makes *one* verify call over gamma + 1 positions, and commits what the rule
says: the accepted drafts and the recovered or bonus token. Its time is c(gamma + 1) + gamma * c_draft, so

    speed-up = mean tokens a round * c(1) / (c(gamma + 1) + gamma * c_draft)

Nothing here reads a clock or a global generator: the same arguments give the same rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge_agent.cost_model import CostCurve
from edge_agent.gamma_chooser import measured_speedup
from shared.acceptance import Draft, judge
from shared.sampling import AcceptanceRule, Distribution, Sampler, SamplingParams, draw

NORMAL_95 = 1.96
"""Standard deviations on either side that hold 95% of a normal distribution."""

MEASURED_VOCAB = 16
IDEAL_CURVE = CostCurve((1.0, 1.0))
"""Verifying any number of positions costs what one costs."""


@dataclass(frozen=True)
class Pair:
    """What target and draft think of one position. target_logits: float64 [vocab_size]."""

    target_logits: NDArray[np.float64]
    draft: Distribution

    @property
    def target(self) -> Distribution:
        """The target's distribution."""
        probs = np.exp(self.target_logits)
        keep = np.flatnonzero(probs)
        return Distribution(keep, probs[keep] / probs[keep].sum())


@dataclass(frozen=True)
class Workload:
    """What the rounds are made of: for each draft position the pairs that it is drawn from, all equally likely.

    Positions past the last go on with the last.
    """

    label: str
    positions: tuple[tuple[Pair, ...], ...]

    def at(self, position: int) -> tuple[Pair, ...]:
        """The pairs of one draft position."""
        return self.positions[min(position, len(self.positions) - 1)]

    def rates(self, gamma: int, rule: AcceptanceRule) -> list[float]:
        """For each of gamma positions the exact chance that its token is accepted, given those before it."""
        known = [
            sum(acceptance(pair.target, pair.draft, rule) for pair in pairs) / len(pairs)
            for pairs in self.positions[:gamma]
        ]
        return known + known[-1:] * (gamma - len(known))


@dataclass(frozen=True)
class SpeedupRow:
    """One gamma. alpha: chance of a draft token given those before it, on average over the positions. ci95: half the
    width of the 95% confidence interval of `speedup_simulated`."""

    gamma: int
    alpha: float
    speedup_simulated: float
    ci95: float
    speedup_closed_form: float


def acceptance(target: Distribution, draft: Distribution, rule: AcceptanceRule) -> float:
    """Exact chance that a token drawn from `draft` is accepted.

    Rejection: sum_x min(p_x, q_x) (Leviathan et al. 2023, corollary 3.6). Coupled: both sides take the argmin of
    E_x / p_x with the same exponential noise, so they agree with the probability Jaccard index
    sum_x 1 / sum_y max(p_y / p_x, q_y / q_x) over the ids that both know (Moulton and Jiang 2018).
    """
    ids = np.union1d(target.ids, draft.ids)
    p = np.array([target.prob(i) for i in ids])
    q = np.array([draft.prob(i) for i in ids])
    if rule is AcceptanceRule.REJECTION:
        return float(np.minimum(p, q).sum())
    both = np.flatnonzero((p > 0) & (q > 0))
    return float(sum(1.0 / np.maximum(p / p[x], q / q[x]).sum() for x in both))


def random_workload(distance: float, *, num_pairs: int = 100, vocab_size: int = 32, seed: int = 0) -> Workload:
    """Random targets, and drafts that see them through noise: logits are N(0, 2^2), the draft's differ by
    N(0, distance^2)."""
    generator = np.random.default_rng(seed)
    pairs = []
    for _ in range(num_pairs):
        target_logits = generator.normal(0.0, 2.0, vocab_size)
        draft_logits = target_logits + generator.normal(0.0, distance, vocab_size)
        pairs.append(Pair(target_logits, Distribution(np.arange(vocab_size), _softmax(draft_logits))))
    return Workload(f"distance {distance:g}", (tuple(pairs),))


def measured_workload(rates: Sequence[float]) -> Workload:
    """A draft that is accepted at these rates by position, whatever the rule.

    The draft follows the target with the rate's probability and else says something that the target never says: both
    rules then accept with exactly this rate.
    """
    if not rates or not all(0.0 <= rate <= 1.0 for rate in rates):
        raise ValueError(f"acceptance rates must be in 0..1, got {list(rates)}")
    return Workload("measured acceptance", tuple((_pair_with(rate),) for rate in rates))


def simulate(
    workload: Workload,
    *,
    max_gamma: int = 12,
    draft_cost: float = 0.1,
    curve: CostCurve = IDEAL_CURVE,
    rule: AcceptanceRule = AcceptanceRule.COUPLED,
    num_rounds: int = 2000,
    seed: int = 0,
) -> list[SpeedupRow]:
    """A row for each gamma from 0 to `max_gamma`.

    draft_cost: of one draft token, as a share of a target token's c(1). curve: c(1), c(2), … of the target in any unit.
    """
    all_rates = workload.rates(max(max_gamma, 1), rule)
    rows = []
    for gamma in range(max_gamma + 1):
        rates = all_rates[:gamma]
        tokens = _tokens_of_rounds(workload, gamma, rule, num_rounds, seed)
        per_token = curve.at(1) / (curve.at(gamma + 1) + gamma * draft_cost * curve.at(1))
        error = NORMAL_95 * float(tokens.std(ddof=1)) / math.sqrt(num_rounds)
        rows.append(
            SpeedupRow(
                gamma=gamma,
                alpha=float(np.mean(rates or all_rates[:1])),
                speedup_simulated=float(tokens.mean()) * per_token,
                ci95=error * per_token,
                speedup_closed_form=measured_speedup(rates, curve, draft_cost * curve.at(1)),
            )
        )
    return rows


def play_round(pairs: Sequence[Pair], params: SamplingParams, position: int) -> int:
    """Tokens that one round commits. pairs: one for each draft token and one for the bonus token."""
    drafting = pairs[:-1]
    drawn = tuple(draw(pair.draft, params.seed, position + i) for i, pair in enumerate(drafting))
    draft = Draft(drawn, "simulated", tuple(pair.draft for pair in drafting))
    logits = np.stack([pair.target_logits for pair in pairs])
    return judge(logits, draft, Sampler(params), position).accepted + 1


def _tokens_of_rounds(
    workload: Workload, gamma: int, rule: AcceptanceRule, num_rounds: int, seed: int
) -> NDArray[np.float64]:
    """Tokens committed by each of many rounds, float64 [num_rounds]."""
    params = SamplingParams(temperature=1.0, seed=seed * 64 + gamma, rule=rule)
    generator = np.random.default_rng((seed, gamma))
    picks = [generator.integers(len(workload.at(i)), size=num_rounds) for i in range(gamma + 1)]
    return np.array(
        [
            play_round([workload.at(i)[picks[i][number]] for i in range(gamma + 1)], params, number * (gamma + 1))
            for number in range(num_rounds)
        ],
        np.float64,
    )


def _pair_with(rate: float) -> Pair:
    """p on the lower half of the ids; q is rate * p there, and the rest of it on the upper half."""
    half = MEASURED_VOCAB // 2
    probs = np.arange(half, 0, -1.0) / (half * (half + 1) / 2)
    logits = np.concatenate([np.log(probs), np.full(half, -np.inf)])
    draft = np.concatenate([rate * probs, (1.0 - rate) * probs])
    keep = np.flatnonzero(draft)
    return Pair(logits, Distribution(keep, draft[keep] / draft[keep].sum()))


def _softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    weights = np.exp(logits - logits.max())
    return np.asarray(weights / weights.sum())
