"""What is simulated: costs as measured, the service's limits, the edges and their links."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from cloud_service.pass_costs import PassCosts
from cloud_service.target import PREFILL_CHUNK

NORMAL_P95 = 1.645


@dataclass(frozen=True)
class Costs:
    """Milliseconds of the cloud's model.

    verify_ms[m - 1]: a pass over m positions of one session. batch_ms[m - 1]: over m positions of several together;
    `verify_ms` where it wasn't measured. prefill_ms: a prompt token. message_ms: handling, between a pass and the next
    that it leads to.
    """

    verify_ms: Sequence[float]
    batch_ms: Sequence[float] = ()
    prefill_ms: float | None = None
    message_ms: float = 0.0

    def __post_init__(self) -> None:
        curves = (*self.verify_ms, *self.batch_ms)
        if not self.verify_ms or not all(0 < cost < math.inf for cost in curves):
            raise ValueError("a cost curve needs positive finite values")

    def verify(self, positions: int) -> float:
        """One pass over so many positions."""
        return self.passes.alone(positions)

    def batch(self, positions: int) -> float:
        """One pass over so many positions of several sessions."""
        return self.passes.together(positions)

    @property
    def passes(self) -> PassCosts:
        """As the service's rules take them."""
        return PassCosts(self.verify_ms, self.batch_ms)

    def prefill(self, tokens: int) -> float:
        """Taking in so many tokens without reading logits."""
        each = self.verify(PREFILL_CHUNK) / PREFILL_CHUNK if self.prefill_ms is None else self.prefill_ms
        return each * tokens


@dataclass(frozen=True)
class Limits:
    """The service's settings of these names. num_slots: caches that fit into a replica's memory."""

    replicas: int = 1
    max_running: int = 8
    max_waiting: int = 32
    num_slots: int = 64
    max_gamma: int = 8


@dataclass(frozen=True)
class Edges:
    """The edges and what they ask for. Means of exponential distributions, except the acceptance (a rate for every
    draft token by itself) and the link (log-normal: median and 95th percentile).

    gamma: draft tokens a round; 0: the cloud generates; None: as many as the cloud's hint allows.
    """

    number: int
    gamma: int | None = None
    pause_s: float = 60.0
    prompt_tokens: float = 200.0
    answer_tokens: float = 64.0
    acceptance: float = 0.7
    draft_ms: float = 5.0
    rtt_ms: float = 40.0
    rtt_p95_ms: float = 120.0

    def link_ms(self, random: Random) -> float:
        """One way of one message."""
        if self.rtt_ms <= 0:
            return 0.0
        sigma = math.log(max(self.rtt_p95_ms / self.rtt_ms, 1.0)) / NORMAL_P95
        return self.rtt_ms * math.exp(random.gauss(0.0, sigma)) / 2

    def length(self, mean: float, random: Random) -> int:
        """A prompt's or an answer's tokens; a whole mean of 1 is always 1."""
        return max(1, round(random.expovariate(1.0 / mean))) if mean > 1 else 1

    def accepted(self, gamma: int, random: Random) -> int:
        """Draft tokens of a round that stand."""
        return next((position for position in range(gamma) if random.random() >= self.acceptance), gamma)
