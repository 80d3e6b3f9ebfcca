"""From logits to the distribution a token is drawn from, and the noise it is drawn with.

All of it is a pure function of the logits, the request's parameters, the tokens so far, and (seed, position, token id):
no state of a random generator is carried, so who computes a token, and in which batch, can't change it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from shared.causal_lm import Logits
from shared.constraint import UNCONSTRAINED, TokenConstraint

GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy, as in vLLM: the division would overflow float32 and change nothing."""

MIN_REPETITION_PENALTY = 0.01
"""Logits are divided by it: far smaller ones would overflow."""

_NEGLIGIBLE_NATS = 50.0
"""exp(-50) * 152,000 ids is under the rounding of a float64 sum to 1: such ids can be left out without a trace."""


class AcceptanceRule(StrEnum):
    """How a draft token is judged; both give the target's distribution exactly."""

    COUPLED = "coupled"
    REJECTION = "rejection"


class SamplingParams(BaseModel):
    """How the next token is chosen. The same values apply to draft and target, or nothing would be lossless."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float, Field(ge=MIN_REPETITION_PENALTY, le=10)] = 1.0
    logit_bias: dict[int, Annotated[float, Field(ge=-100, le=100)]] = Field(default_factory=dict)
    min_tokens: Annotated[int, Field(ge=0)] = 0
    seed: Annotated[int, Field(ge=0, lt=2**64)] = 0
    rule: AcceptanceRule = AcceptanceRule.COUPLED

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < GREEDY_BELOW


@dataclass(frozen=True)
class Distribution:
    """Probabilities of the ids that survived the filters; every other id has probability 0.

    ids: int64 [k], ascending. probs: float64 [k], sum 1.
    """

    ids: NDArray[np.int64]
    probs: NDArray[np.float64]

    def prob(self, token: int) -> float:
        """Probability of one id."""
        index = int(np.searchsorted(self.ids, token))
        return float(self.probs[index]) if index < len(self.ids) and self.ids[index] == token else 0.0

    @staticmethod
    def one_hot(token: int) -> Distribution:
        """All the probability on one id."""
        return Distribution(np.array([token], np.int64), np.ones(1))


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)

Bits = TypeVar("Bits", np.uint64, NDArray[np.uint64])


class Noise(StrEnum):
    """What a random number is for: each use has a stream of its own."""

    CHOICE = "choice"
    ACCEPT = "accept"
    RESIDUAL = "residual"
    DRAFT = "draft"


_STREAMS = {noise: np.uint64(index) for index, noise in enumerate(Noise)}


def uniform(seed: int, position: int, ids: NDArray[np.int64], noise: Noise = Noise.CHOICE) -> NDArray[np.float64]:
    """Uniform numbers in (0, 1), one an id, from a counter-based generator keyed by (seed, stream, position, id).

    Three rounds of the splitmix64 finaliser (Steele, Lea, Flood 2014), one a key; 53 bits, centred so that neither 0
    nor 1 comes up.
    """
    with np.errstate(over="ignore"):
        key = _mix(np.uint64(seed) + _GOLDEN * (_STREAMS[noise] + np.uint64(1)))
        key = _mix(key ^ (np.uint64(position) * _GOLDEN))
        bits = _mix(key ^ (ids.astype(np.uint64) * _GOLDEN))
    return ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def _mix(x: Bits) -> Bits:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def draw(distribution: Distribution, seed: int, position: int, noise: Noise = Noise.CHOICE) -> int:
    """The id that wins under the noise of (seed, position): the Gumbel-max trick.

    argmax_x log p(x) + g(x) with g = -log(-log u) is argmin_x -log(u_x) / p(x). As -log u >= 1 - u, the ids whose
    (1 - u) / p is over the best exact value can't win, so the logarithm is taken for a handful of ids only.
    """
    if len(distribution.ids) == 1:
        return int(distribution.ids[0])
    u = uniform(seed, position, distribution.ids, noise)
    with np.errstate(divide="ignore", over="ignore"):
        bound = (1.0 - u) / distribution.probs
        first = int(np.argmin(bound))
        best = -np.log(u[first]) / distribution.probs[first]
        candidates = np.flatnonzero(bound <= best)
        exact = -np.log(u[candidates]) / distribution.probs[candidates]
    return int(distribution.ids[candidates[np.argmin(exact)]])


class Sampler:
    """The distribution of one request's next token, with the penalties' counts and the grammar's state it hangs on."""

    def __init__(
        self,
        params: SamplingParams,
        *,
        stop_ids: Iterable[int] = (),
        prompt: Iterable[int] = (),
        generated: Iterable[int] = (),
        constraint: TokenConstraint = UNCONSTRAINED,
    ) -> None:
        """constraint: where it stands after `generated`; the sampler works on a copy."""
        self.params = params
        self._constraint = constraint.fork()
        self._stop_ids = np.array(sorted(stop_ids), np.int64)
        # Penalties over the answer follow OpenAI; the repetition penalty covers the prompt too, as in transformers.
        self._prompt_ids = frozenset(prompt) if params.repetition_penalty != 1.0 else frozenset()
        self._counts = dict(Counter(generated))
        self._num_generated = sum(self._counts.values())
        self._bias_ids = np.array(sorted(params.logit_bias), np.int64)
        self._biases = np.array([params.logit_bias[i] for i in self._bias_ids.tolist()], np.float64)

    def fork(self) -> Sampler:
        """A copy to draft with: what it appends, the original never sees."""
        other = object.__new__(Sampler)
        other.__dict__.update(self.__dict__)
        other._counts = dict(self._counts)
        other._constraint = self._constraint.fork()
        return other

    def append(self, token: int) -> None:
        """Count one more token of the answer."""
        self._counts[token] = self._counts.get(token, 0) + 1
        self._num_generated += 1
        self._constraint.append(token)

    def distribution(self, logits: Logits) -> Distribution:
        """The distribution of the next token. logits: [vocab_size], unchanged.

        Raises:
            UnsupportedFieldError: the constraint can't be followed any further.
        """
        allowed = self._constraint.mask()
        if allowed is None and self._leaves_argmax_alone():
            return Distribution.one_hot(int(np.argmax(logits)))
        adjusted = self._ban(self._adjust(logits), allowed)
        if self.params.greedy:
            return Distribution.one_hot(int(np.argmax(adjusted)))
        return filtered_softmax(adjusted, self.params)

    def draw(self, logits: Logits, position: int) -> int:
        """The next token, at `position` of the sequence, as target-only decoding draws it."""
        return draw(self.distribution(logits), self.params.seed, position)

    def _leaves_argmax_alone(self) -> bool:
        params = self.params
        return (
            params.greedy
            and params.presence_penalty == params.frequency_penalty == 0.0
            and params.repetition_penalty == 1.0
            and not params.logit_bias
            and self._num_generated >= params.min_tokens
        )

    def _adjust(self, logits: Logits) -> NDArray[np.float64]:
        """Penalties on the raw logits, then the biases. Returns a float64 copy."""
        params = self.params
        adjusted = logits.astype(np.float64)
        seen = np.array(sorted(self._prompt_ids | self._counts.keys()), np.int64)
        if params.repetition_penalty != 1.0 and len(seen):
            values = adjusted[seen]
            adjusted[seen] = np.where(
                values > 0, values / params.repetition_penalty, values * params.repetition_penalty
            )
        if (params.presence_penalty or params.frequency_penalty) and self._counts:
            ids = np.array(list(self._counts), np.int64)
            counts = np.array(list(self._counts.values()), np.float64)
            adjusted[ids] -= params.presence_penalty + params.frequency_penalty * counts
        if len(self._bias_ids):
            adjusted[self._bias_ids] += self._biases
        return adjusted

    def _ban(self, adjusted: NDArray[np.float64], allowed: NDArray[np.bool_] | None) -> NDArray[np.float64]:
        """Without what the constraint forbids and without an early end. May change `adjusted`.

        Where the constraint leaves nothing but the end, the answer ends, however few tokens it has.
        """
        if allowed is not None:
            adjusted = _masked(adjusted, allowed)
        if self._num_generated >= self.params.min_tokens:
            return adjusted
        unended = adjusted.copy()
        unended[self._stop_ids] = -np.inf
        return adjusted if np.isneginf(unended.max()) else unended


def _masked(logits: NDArray[np.float64], allowed: NDArray[np.bool_]) -> NDArray[np.float64]:
    """A copy without the ids that may not come. Ids past the tokenizer's vocabulary stand for nothing and go too."""
    width = min(len(logits), len(allowed))
    masked = np.full_like(logits, -np.inf)
    np.copyto(masked[:width], logits[:width], where=allowed[:width])
    return masked


def filtered_softmax(logits: NDArray[np.float64], params: SamplingParams) -> Distribution:
    """Temperature, then min-p, top-k and top-p, each on what the one before left (vLLM's order).

    logits: float64 [vocab_size]. Ties at the edge of top-k and top-p are cut by id, so that a row has one answer.
    """
    scaled = (logits - logits.max()) / params.temperature
    ids = np.flatnonzero(scaled > -_NEGLIGIBLE_NATS)
    weights = np.exp(scaled[ids])
    if params.min_p > 0:
        keep = weights >= params.min_p * weights.max()
        ids, weights = ids[keep], weights[keep]
    if 0 < params.top_k < len(ids):
        keep = _largest(weights, params.top_k)
        ids, weights = ids[keep], weights[keep]
    if params.top_p < 1:
        keep = _nucleus(weights, params.top_p)
        ids, weights = ids[keep], weights[keep]
    return Distribution(ids, weights / weights.sum())


def _largest(weights: NDArray[np.float64], count: int) -> NDArray[np.int64]:
    """Ascending indices of the `count` largest weights, the lower index first among equals."""
    threshold = np.partition(weights, -count)[-count]
    above = np.flatnonzero(weights > threshold)
    at = np.flatnonzero(weights == threshold)[: count - len(above)]
    return np.sort(np.concatenate([above, at]))


def _nucleus(weights: NDArray[np.float64], top_p: float) -> NDArray[np.int64]:
    """Ascending indices of the smallest set of largest weights whose share reaches `top_p`.

    Weights that even together are under half of what it leaves out aren't sorted.
    """
    total = weights.sum()
    likely = np.flatnonzero(weights >= (1.0 - top_p) / 2.0 * total / len(weights))
    order = likely[np.argsort(-weights[likely], kind="stable")]
    share = np.cumsum(weights[order]) / total
    return np.sort(order[: int(np.searchsorted(share, top_p)) + 1])


def likelihood(logits: Logits, token: int) -> float:
    """Probability of a token before temperature and filters. logits: [vocab_size]."""
    return float(1.0 / np.exp(np.minimum(logits - logits[token], _NEGLIGIBLE_NATS), dtype=np.float32).sum())


def top_logprobs(logits: Logits, chosen: int, count: int) -> tuple[float, list[tuple[int, float]]]:
    """Log probability of `chosen` and the `count` likeliest ids with theirs, of the unfiltered target.

    logits: [vocab_size]. The values are those before temperature and filters, as OpenAI and vLLM report them.
    """
    values = logits.astype(np.float64)
    log_total = float(values.max() + np.log(np.exp(values - values.max()).sum()))
    if not count:
        return float(values[chosen]) - log_total, []
    best = np.argpartition(values, -count)[-count:]
    best = best[np.lexsort((best, -values[best]))]
    return float(values[chosen]) - log_total, [(int(i), float(values[i]) - log_total) for i in best]
