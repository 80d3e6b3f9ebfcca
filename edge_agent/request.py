"""One request as the engine sees it: token ids and wishes, nothing of HTTP."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from shared.constraint import UNCONSTRAINED, TokenConstraint
from shared.sampling import SamplingParams


class Execution(StrEnum):
    """Where the caller wants the answer made."""

    AUTO = "auto"
    PREFER_DEVICE = "prefer_device"
    PREFER_CLOUD = "prefer_cloud"
    ONLY_DEVICE = "only_device"
    ONLY_CLOUD = "only_cloud"


class Speculation(StrEnum):
    """Whether the caller wants drafts."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


class Privacy(StrEnum):
    """`on_device`: no token of this request ever leaves the device, whatever its state."""

    STANDARD = "standard"
    ON_DEVICE = "on_device"


@dataclass(frozen=True)
class GenerationRequest:
    """A validated request. `stop_ids` end the answer and are not part of its text.

    constraint: what the answer is held to, at its start.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop_ids: frozenset[int] = frozenset()
    num_top_logprobs: int | None = None
    prediction: tuple[int, ...] = ()
    execution: Execution = Execution.AUTO
    speculation: Speculation = Speculation.AUTO
    max_gamma: int = 16
    privacy: Privacy = Privacy.STANDARD
    constraint: TokenConstraint = UNCONSTRAINED
    request_id: str = ""
    tenant: str = ""

    @property
    def structured(self) -> bool:
        """Whether the answer is held to a grammar. Such a request stays on the device: no message to the cloud carries
        grammars, and tokens that the cloud chose without one could break it."""
        return self.constraint is not UNCONSTRAINED

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError("a request needs at least one prompt token")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
