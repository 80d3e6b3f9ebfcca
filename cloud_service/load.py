"""How busy the service is, and how long a draft it can use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shared.protocol import Load

SMOOTHING = 0.1
"""Weight of a new measurement in the running means."""


def pass_cost_ms(cost_ms: Sequence[float], positions: int) -> float:
    """Time of one pass over so many positions; past the measured ones the last slope goes on."""
    if positions <= len(cost_ms):
        return cost_ms[positions - 1]
    slope = cost_ms[-1] - cost_ms[-2] if len(cost_ms) > 1 else cost_ms[-1]
    return cost_ms[-1] + slope * (positions - len(cost_ms))


def expected_tokens(acceptance: float, gamma: int) -> float:
    """E(alpha, gamma) = 1 + alpha + … + alpha^gamma: tokens that a round commits."""
    return sum(acceptance**power for power in range(gamma + 1))


def best_gamma(acceptance: float, cost_ms: Sequence[float], idle_ms: float, running: int, max_gamma: int) -> int:
    """The draft length at which `running` sessions get the most tokens a second out of one model.

    A session rests `idle_ms` between its rounds (network, drafting). With drafts the passes of n sessions run one after
    another: a cycle takes max(n c(gamma + 1), c(gamma + 1) + idle) and yields n E(alpha, gamma) tokens. Without, they
    run as one batch: c(n) + idle for n tokens.
    """

    def tokens_per_ms(gamma: int) -> float:
        if gamma == 0:
            return running / (pass_cost_ms(cost_ms, running) + idle_ms)
        cost = pass_cost_ms(cost_ms, gamma + 1)
        return running * expected_tokens(acceptance, gamma) / max(running * cost, cost + idle_ms)

    return max(range(max_gamma + 1), key=tokens_per_ms)


@dataclass
class LoadMeter:
    """Running means of what the service sees. cost_ms[m - 1]: one pass over m positions.

    running: requests that hold a place; waiting: those that queue for one; streams: continued answers among them.
    """

    cost_ms: Sequence[float]
    max_gamma: int
    running: int = 0
    streams: int = 0
    waiting: int = 0
    queue_ms: float = 0.0
    idle_ms: float = 50.0
    acceptance: float = 0.7

    def queued(self, queue_ms: float) -> None:
        """A request waited so long for the model."""
        self.queue_ms += SMOOTHING * (queue_ms - self.queue_ms)

    def rested(self, idle_ms: float) -> None:
        """A session came back so long after its last reply."""
        self.idle_ms += SMOOTHING * (idle_ms - self.idle_ms)

    def judged(self, proposed: int, accepted: int) -> None:
        """A draft's outcome; no draft is no sample."""
        if proposed:
            self.acceptance += SMOOTHING * (accepted / proposed - self.acceptance)

    def load(self, num_sessions: int) -> Load:
        """What goes into a reply: alone, any draft is welcome; beside others only what raises the throughput.

        num_sessions: those in the middle of an answer, resting ones included; streams are counted here.
        """
        users = self.streams + num_sessions
        if self.waiting:
            hint = 0
        elif users <= 1:
            hint = self.max_gamma
        else:
            hint = max(1, best_gamma(self.acceptance, self.cost_ms, self.idle_ms, users, self.max_gamma))
        return Load(queue_ms=round(self.queue_ms, 1), running=users, gamma_hint=hint)
