"""Every message between the edge and the cloud: token ids and counts, no text.

A session's first message carries an `Opening` (prompt, sampling, stop ids); later ones only what is new since the last.
Fields that hold their default are left out on the wire.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from shared.acceptance import TokenLogprobs
from shared.sampling import SamplingParams

PROTOCOL = 1
MAX_GAMMA = 16
MAX_TOKENS = 131_072

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[tuple[TokenId, ...], Field(max_length=MAX_TOKENS)]
DraftIds = Annotated[tuple[TokenId, ...], Field(max_length=MAX_GAMMA)]
SessionId = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{8,64}$")]
TopLogprobs = Annotated[int, Field(ge=0, le=20)]

SESSION_HEADER = "X-Session"
"""Repeats the session id where a load balancer can read it."""


class Message(BaseModel):
    """Base of every message."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    protocol: Annotated[int, Field(ge=1)] = PROTOCOL

    def encode(self) -> bytes:
        """Compact JSON without the fields that hold their default, the version excepted."""
        content = {"protocol": self.protocol, **self.model_dump(mode="json", exclude_defaults=True)}
        return json.dumps(content, separators=(",", ":"), allow_nan=False).encode("ascii")


class HandshakeRequest(Message):
    """Do we count in the same tokens?"""

    tokenizer_fingerprint: Annotated[str, Field(min_length=1, max_length=128)]
    vocab_size: Annotated[int, Field(ge=1)]


class HandshakeReply(Message):
    """What stands on the other side. verify_cost_ms[m - 1]: one pass over m positions."""

    model: str
    context: Annotated[int, Field(ge=1)]
    verify_cost_ms: tuple[Annotated[float, Field(ge=0)], ...]
    max_gamma: Annotated[int, Field(ge=0, le=MAX_GAMMA)]


class Opening(BaseModel):
    """What a session's first message says once. The first `prompt_len` of `tokens` are the prompt."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    tokens: Annotated[TokenIds, Field(min_length=1)]
    prompt_len: Annotated[int, Field(ge=1)]
    sampling: SamplingParams = Field(default_factory=SamplingParams)
    stop_ids: Annotated[tuple[TokenId, ...], Field(max_length=1024)] = ()
    logprobs: TopLogprobs | None = None


class VerifyRequest(Message):
    """Check a draft. It follows the session's first `prefix_len` tokens and `new_tokens`.

    prefix_crc: `tokens_crc` of those first tokens, so that a replica with another past finds out before it answers.
    """

    session_id: SessionId
    round: Annotated[int, Field(ge=0)]
    prefix_len: Annotated[int, Field(ge=0)] = 0
    prefix_crc: Annotated[int, Field(ge=0, lt=2**32)] = 0
    new_tokens: TokenIds = ()
    draft_tokens: DraftIds = ()
    opening: Opening | None = None


class Load(BaseModel):
    """How busy the cloud is. gamma_hint: the longest draft it wants now; 0: none at all."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    queue_ms: Annotated[float, Field(ge=0)] = 0.0
    running: Annotated[int, Field(ge=0)] = 0
    gamma_hint: Annotated[int, Field(ge=0, le=MAX_GAMMA)]


class WireLogprobs(BaseModel):
    """Log probability of one token and of the likeliest in its place."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    logprob: float
    top: tuple[tuple[TokenId, float], ...] = ()

    @staticmethod
    def of(value: TokenLogprobs) -> WireLogprobs:
        """From what the acceptance rules report."""
        return WireLogprobs(logprob=value.logprob, top=value.top)

    def value(self) -> TokenLogprobs:
        """Back again."""
        return TokenLogprobs(self.logprob, self.top)


Finish = Literal["stop", "length"]


class VerifyReply(Message):
    """The first `accepted` draft tokens stand, then comes `next_token`.

    timing_ms: time in the service, its queue included.
    """

    round: int
    accepted: Annotated[int, Field(ge=0, le=MAX_GAMMA)]
    next_token: TokenId
    finish: Finish | None = None
    logprobs: tuple[WireLogprobs, ...] | None = None
    timing_ms: Annotated[float, Field(ge=0)]
    load: Load


class ContinueRequest(Message):
    """Make the rest of an answer. reason: the policy's word for the handoff."""

    session_id: SessionId
    opening: Opening
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)]
    reason: Annotated[str, Field(max_length=64)] = ""


class TokenFrame(BaseModel):
    """One token of a continued answer, at `position` of the sequence. A stop id is sent too."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    position: Annotated[int, Field(ge=0)]
    token: TokenId
    logprobs: WireLogprobs | None = None


class FinishFrame(BaseModel):
    """The last frame of a continued answer."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    finish: Finish
    load: Load


ModeName = Literal["local_speculative", "local_direct", "cloud_verify", "cloud_generate"]
HeatName = Literal["nominal", "eased", "direct", "offload", "critical"]
DeviceId = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]


class DeviceReport(Message):
    """How an edge fares: numbers and words of ours, nothing of any text. What isn't known is left out.

    device_id: random, the same for as long as the device keeps it. heat: the rung of the policy's ladder that the
    device's readings stand on. The rest is of the rounds since the last report: mode, gamma and reason of the latest,
    acceptance_rate where something was drafted, tokens_per_second where something was decoded.
    """

    device_id: DeviceId
    model: Annotated[str, Field(min_length=1, max_length=128)]
    heat: HeatName | None = None
    temperature_c: Annotated[float, Field(ge=-60, le=150)] | None = None
    battery_percent: Annotated[float, Field(ge=0, le=100)] | None = None
    charging: bool | None = None
    mode: ModeName | None = None
    gamma: Annotated[int, Field(ge=0, le=MAX_GAMMA)] | None = None
    reason: Annotated[str, Field(pattern=r"^[a-z_]{1,32}$")] | None = None
    acceptance_rate: Annotated[float, Field(ge=0, le=1)] | None = None
    tokens_per_second: Annotated[float, Field(ge=0)] | None = None


def tokens_crc(tokens: Sequence[int]) -> int:
    """CRC-32 of the ids as 32-bit little-endian numbers."""
    return zlib.crc32(np.asarray(tokens, dtype="<u4").tobytes())
