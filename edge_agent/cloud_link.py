"""The agent's end of the way to the cloud: what it knows of it, and verifiers for the requests that may use it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Protocol

from edge_agent.circuit_breaker import CircuitState
from edge_agent.cloud_client import CloudClient
from edge_agent.cloud_verifier import CloudGenerator, CloudVerifier
from edge_agent.decision import Mode
from edge_agent.draft_ahead import DraftAhead
from edge_agent.link_state import NO_LINK, LinkState
from edge_agent.request import Execution, GenerationRequest, Privacy
from edge_agent.verifier import Verifier
from shared.errors import CloudError, TokenizerMismatchError


class CloudLink(Protocol):
    """What the engine asks of the way to the cloud."""

    @property
    def state(self) -> LinkState:
        """What is known of it now."""

    @property
    def model_name(self) -> str | None:
        """The cloud's model, once it is known."""

    async def open(self, request: GenerationRequest, draft_ahead: DraftAhead | None) -> Mapping[Mode, Verifier]:
        """Verifiers for the modes that this request may use; none for one that must stay."""

    async def close(self) -> None:
        """Hang up."""


class NoCloud:
    """An agent without a cloud."""

    state = NO_LINK
    model_name: str | None = None

    async def open(self, request: GenerationRequest, draft_ahead: DraftAhead | None) -> Mapping[Mode, Verifier]:
        """None."""
        return {}

    async def close(self) -> None:
        """Nothing to hang up."""


class CloudService:
    """A cloud verifier. No request brings anything there, not even a greeting, before the first that may leave."""

    def __init__(self, client: CloudClient) -> None:
        self.client = client
        self._greeting: asyncio.Task[None] | None = None

    @property
    def state(self) -> LinkState:
        """What is known of it now."""
        return self.client.link_state

    @property
    def model_name(self) -> str | None:
        """The cloud's model, once it is known."""
        return self.client.service.model if self.client.service is not None else None

    @property
    def circuit_state(self) -> CircuitState:
        """Whether requests are let through to it."""
        return self.client.circuit_state

    async def open(self, request: GenerationRequest, draft_ahead: DraftAhead | None) -> Mapping[Mode, Verifier]:
        """Verifiers for both cloud modes, unless the request must stay on the device."""
        if not may_leave(request):
            return {}
        if self._greeting is None:
            self._greeting = asyncio.create_task(self.client.run())
        if self.client.service is None and request.execution in (Execution.ONLY_CLOUD, Execution.PREFER_CLOUD):
            # The caller wants it now: without the greeting's answer the policy would call it out of reach.
            await self._greet()
        return {
            Mode.CLOUD_VERIFY: CloudVerifier(self.client, request, draft_ahead),
            Mode.CLOUD_GENERATE: CloudGenerator(self.client, request),
        }

    async def close(self) -> None:
        """Hang up."""
        if self._greeting is not None:
            self._greeting.cancel()
            await asyncio.wait({self._greeting})
        await self.client.close()

    async def _greet(self) -> None:
        try:
            await self.client.handshake()
        except (CloudError, TokenizerMismatchError):
            return  # `run` tries again and says in the log what is wrong; the policy sees an unhealthy link.


def may_leave(request: GenerationRequest) -> bool:
    """Whether any token of the request may be sent to the cloud."""
    on_device = request.privacy is Privacy.ON_DEVICE or request.execution is Execution.ONLY_DEVICE
    return not on_device and not request.structured
