"""How a session asks for its orders and tells what came of them; the policy engine stands behind this."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from edge_agent.decision import Decision, Mode, Reason
from edge_agent.drafters.base import Appraiser, Unpriced
from edge_agent.energy import EnergyUse
from edge_agent.request import GenerationRequest, Speculation
from edge_agent.round import Round
from shared.acceptance import Draft


class RoundState(NamedTuple):
    """Where a request stands before a round. Counts in tokens."""

    request: GenerationRequest
    round: int
    num_generated: int
    context_left: int

    @property
    def num_left(self) -> int:
        """Tokens that the answer may still gain."""
        return self.request.max_tokens - self.num_generated


class RoundController(Appraiser, Protocol):
    """Decides one request's rounds, and appraises drafts for the round decided last."""

    @property
    def energy(self) -> EnergyUse:
        """Joules of the request so far."""

    @property
    def energy_source(self) -> str | None:
        """How they are known: `rapl`, `battery`, `cpu_time_model`, `simulated`; None where nobody measures."""

    def decide(self, state: RoundState) -> Decision:
        """The orders for the next round."""

    def trim(self, state: RoundState, draft: Draft) -> int:
        """How many of a draft's tokens are worth verifying, now that it is known: 0 to len(draft)."""

    def observe(self, state: RoundState, round: Round) -> None:
        """What came of it: times, drafts, acceptance."""

    def cloud_failed(self, state: RoundState) -> Decision:
        """Orders for a round that the cloud could not serve.

        Raises:
            CloudUnavailableError: the request forbids the device.
        """


class RoundPolicy(Protocol):
    """Opens a controller for each request."""

    def open(self, request: GenerationRequest) -> RoundController:
        """The controller of a new request."""


class FixedController(Unpriced):
    """The same gamma in every round, as far as the request allows: for measuring, and for a device with no policy."""

    energy = EnergyUse()
    energy_source: str | None = None

    def __init__(self, gamma: int, reason: Reason = Reason.NOMINAL) -> None:
        self._gamma = gamma
        self._reason = reason

    def decide(self, state: RoundState) -> Decision:
        """Speculate with the fixed gamma, or decode directly where the request turns speculation off."""
        gamma = min(self._gamma, state.request.max_gamma)
        if state.request.speculation is Speculation.OFF or gamma == 0:
            return Decision(Mode.LOCAL_DIRECT, 0, Reason.REQUESTED, goes_on=True)
        return Decision(Mode.LOCAL_SPECULATIVE, gamma, self._reason)

    def trim(self, state: RoundState, draft: Draft) -> int:
        """All of them."""
        return len(draft)

    def observe(self, state: RoundState, round: Round) -> None:
        """Nothing is learnt."""

    def cloud_failed(self, state: RoundState) -> Decision:
        """Direct decoding."""
        return Decision(Mode.LOCAL_DIRECT, 0, Reason.CLOUD_UNAVAILABLE)


class FixedPolicy:
    """Gives every request a `FixedController`."""

    def __init__(self, gamma: int) -> None:
        self._gamma = gamma

    def open(self, request: GenerationRequest) -> RoundController:
        """A controller with the fixed gamma."""
        return FixedController(self._gamma)
