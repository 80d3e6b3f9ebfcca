"""What is known of the way to the cloud verifier."""

from __future__ import annotations

from typing import NamedTuple


class LinkState(NamedTuple):
    """The cloud as the last handshake, replies and the circuit breaker show it.

    verify_cost_s: seconds of a pass over m = 1, 2, … positions there. gamma_hint: the longest draft it asks for under
    its present load; 0 means that it is saturated.
    """

    configured: bool = False
    healthy: bool = False
    rtt_s: float | None = None
    verify_cost_s: tuple[float, ...] = ()
    queue_s: float = 0.0
    max_gamma: int = 16
    gamma_hint: int | None = None

    @property
    def usable(self) -> bool:
        """Whether a round may be sent there."""
        return self.configured and self.healthy

    @property
    def saturated(self) -> bool:
        """Whether it asks for no drafts at all."""
        return self.gamma_hint == 0

    @property
    def gamma_limit(self) -> int:
        """The longest draft it takes now."""
        return self.max_gamma if self.gamma_hint is None else min(self.max_gamma, self.gamma_hint)


NO_LINK = LinkState()
