"""How busy the service is, and how long a draft it can use."""

from __future__ import annotations

from dataclasses import dataclass

from cloud_service.pass_costs import PassCosts
from shared.protocol import Load

SMOOTHING = 0.1
"""Weight of a new measurement in the running means."""


def expected_tokens(acceptance: float, gamma: int) -> float:
    """E(alpha, gamma) = 1 + alpha + … + alpha^gamma: tokens that a round commits."""
    return sum(acceptance**power for power in range(gamma + 1))


def best_gamma(acceptance: float, costs: PassCosts, idle_ms: float, running: int, max_gamma: int) -> int:
    """The draft length at which `running` sessions get the most tokens a second out of one model.

    A stream rests after no token: n of them get n tokens a common step. With drafts a session rests `idle_ms` between
    its rounds (network, drafting), and n rounds are one pass, or passes of their own where that costs less.
    """

    def tokens_per_ms(gamma: int) -> float:
        positions = [gamma + 1] * running
        apart = sum(map(costs.alone, positions))
        pass_ms = min(apart, costs.together(sum(positions))) if running > 1 else apart
        return running * expected_tokens(acceptance, gamma) / (pass_ms + (idle_ms if gamma else 0.0))

    return max(range(max_gamma + 1), key=tokens_per_ms)


@dataclass
class LoadMeter:
    """Running means of what the service sees.

    running: requests that hold a place; waiting: those that queue for one; streams: continued answers among them.
    """

    costs: PassCosts
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
            hint = max(1, best_gamma(self.acceptance, self.costs, self.idle_ms, users, self.max_gamma))
        return Load(queue_ms=round(self.queue_ms, 1), running=users, gamma_hint=hint)
