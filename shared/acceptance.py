"""The acceptance rules: given the target's logits and a draft, which tokens come next.

Words: *accepted* drafts are those the target agrees with; the *recovered* token is the target's at the first
rejection; the *bonus* token is the extra one after full acceptance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from shared.causal_lm import Logits
from shared.sampling import AcceptanceRule, Distribution, Noise, Sampler, draw, top_logprobs, uniform


@dataclass(frozen=True)
class Draft:
    """Tokens that a drafter proposes after the committed ones.

    distributions[i] is what tokens[i] was really drawn from, after the same temperature, filters and penalties as the
    target's; a drafter that doesn't draw (an n-gram, an argmax) leaves it one-hot. confidences[i] is the drafter's own
    probability that tokens[i] is right, in [0, 1], for the policy and for showing.
    """

    tokens: tuple[int, ...] = ()
    drafter: str = "none"
    distributions: tuple[Distribution, ...] = field(default=(), repr=False)
    confidences: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.distributions and len(self.distributions) != len(self.tokens):
            raise ValueError(f"{len(self.tokens)} draft tokens with {len(self.distributions)} distributions")

    def distribution(self, index: int) -> Distribution:
        """What token `index` was drawn from."""
        return self.distributions[index] if self.distributions else Distribution.one_hot(self.tokens[index])

    def __len__(self) -> int:
        return len(self.tokens)


NO_DRAFT = Draft()


@dataclass(frozen=True)
class TokenLogprobs:
    """Log probability of an emitted token and of the likeliest ids in its place, by the target."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Verdict(NamedTuple):
    """What the target says of a draft: the first `accepted` tokens stand, then comes `next_token`.

    pass_s: seconds of the target's pass, where that began before it was asked for.
    """

    accepted: int
    next_token: int
    logprobs: tuple[TokenLogprobs, ...] = ()
    pass_s: float = 0.0

    def tokens(self, draft: Draft) -> tuple[int, ...]:
        """The tokens to commit."""
        return (*draft.tokens[: self.accepted], self.next_token)


def choose(target: Distribution, draft_token: int, drawn_from: Distribution, sampler: Sampler, position: int) -> int:
    """The target's token at `position`; the draft token is accepted if and only if this is it."""
    seed = sampler.params.seed
    if sampler.params.greedy or sampler.params.rule is AcceptanceRule.COUPLED:
        # Drafter-invariant speculative decoding (arXiv 2408.07978): the token depends on seed and target alone.
        return draw(target, seed, position)
    # Leviathan et al. and Chen et al. 2023: accept with probability min(1, p/q), else draw from the residual.
    p, q = target.prob(draft_token), drawn_from.prob(draft_token)
    coin = float(uniform(seed, position, np.array([draft_token]), Noise.ACCEPT)[0])
    if coin * q < p:
        return draft_token
    return draw(residual(target, drawn_from), seed, position, Noise.RESIDUAL)


def residual(target: Distribution, drawn_from: Distribution) -> Distribution:
    """normalise(max(p - q, 0)); where p == q there is none, and p itself is right."""
    index = np.searchsorted(drawn_from.ids, target.ids).clip(max=len(drawn_from.ids) - 1)
    q = np.where(drawn_from.ids[index] == target.ids, drawn_from.probs[index], 0.0)
    excess = np.maximum(target.probs - q, 0.0)
    keep = np.flatnonzero(excess)
    if not len(keep):
        return target
    return Distribution(target.ids[keep], excess[keep] / excess[keep].sum())


def judge(
    logits: Logits, draft: Draft, sampler: Sampler, position: int, *, num_top_logprobs: int | None = None
) -> Verdict:
    """Judge a draft whose first token stands at `position` of the sequence.

    logits: [len(draft) + 1, vocab_size]; row i predicts the token at position + i. Row i is penalised with the accepted
    drafts before i; rejected drafts leave no trace. The sampler stays as it is: whoever commits the verdict appends it.
    num_top_logprobs: None for no log probabilities, else how many alternatives to report.
    """
    if len(logits) != len(draft) + 1:
        raise ValueError(f"{len(draft)} draft tokens need {len(draft) + 1} rows of logits, got {len(logits)}")
    logprobs: list[TokenLogprobs] = []
    if draft.tokens:
        sampler = sampler.fork()

    def report(row: Logits, token: int) -> None:
        if num_top_logprobs is not None:
            logprob, top = top_logprobs(row, token, num_top_logprobs)
            logprobs.append(TokenLogprobs(logprob, tuple(top)))

    for index, draft_token in enumerate(draft.tokens):
        target = sampler.distribution(logits[index])
        token = choose(target, draft_token, draft.distribution(index), sampler, position + index)
        report(logits[index], token)
        if token != draft_token:
            return Verdict(index, token, tuple(logprobs))
        sampler.append(token)
    bonus = sampler.draw(logits[-1], position + len(draft))
    report(logits[-1], bonus)
    return Verdict(len(draft), bonus, tuple(logprobs))


def common_prefix_length(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading tokens two sequences share, by bisection: slices compare much faster than a loop does."""
    low, high = 0, min(len(a), len(b))
    probe = high  # Most calls compare a sequence with its own continuation.
    while low < high:
        if tuple(a[low:probe]) == tuple(b[low:probe]):
            low = probe
        else:
            high = probe - 1
        probe = (low + high + 1) // 2
    return low
