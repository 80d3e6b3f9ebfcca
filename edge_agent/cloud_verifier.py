"""The cloud as a `Verifier`: checking this device's drafts, or making the tokens itself."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack

from edge_agent.cloud_client import CloudClient, retried
from edge_agent.draft_ahead import DraftAhead
from edge_agent.request import GenerationRequest
from edge_agent.round import Origin
from shared.acceptance import Draft, Verdict
from shared.errors import CloudProtocolError, CloudRejectedError, CloudSessionLostError, CloudUnavailableError
from shared.protocol import ContinueRequest, Opening, TokenFrame, VerifyReply, VerifyRequest, tokens_crc
from shared.sampling import Sampler

STREAM_ATTEMPTS = 3
"""Times that a broken stream is opened in all, before the round is given up."""


class CloudVerifier:
    """Sends drafts to the cloud's target. The session there opens with the first round and ends with `release`."""

    origin = Origin.CLOUD

    def __init__(self, client: CloudClient, request: GenerationRequest, draft_ahead: DraftAhead | None = None) -> None:
        """draft_ahead: drafts the next round while a verdict is on its way."""
        self._client = client
        self._request = request
        self._draft_ahead = draft_ahead
        self._session_id: str | None = None
        self._round = 0
        self._num_known = 0  # Committed tokens that the cloud has confirmed to hold.

    async def verify(self, tokens: Sequence[int], draft: Draft, sampler: Sampler, *, goes_on: bool = False) -> Verdict:
        """One request a round; two when the cloud has lost the session."""
        if self._draft_ahead is not None:
            self._draft_ahead.start(tokens, draft, sampler)
        try:
            reply = await self._send(tokens, draft)
        except CloudSessionLostError:
            self._session_id = None
            try:
                reply = await self._send(tokens, draft)
            except CloudSessionLostError as error:
                raise CloudUnavailableError("the cloud loses this session again and again") from error
        verdict = self._verdict(reply, draft)
        self._num_known = len(tokens) + verdict.accepted + 1
        return verdict

    async def release(self, tokens: Sequence[int]) -> None:
        """End the session there. It says good-bye in the background: the answer doesn't wait for it."""
        if self._draft_ahead is not None:
            await self._draft_ahead.stop()
        if self._session_id is not None:
            self._client.forget(self._session_id)
            self._session_id = None

    async def _send(self, tokens: Sequence[int], draft: Draft) -> VerifyReply:
        session_id, self._round = self._session_id, self._round + 1
        if session_id is None:
            # Kept before it is used: a request that is cancelled on its way may have opened the session.
            session_id = self._session_id = secrets.token_urlsafe(12)
            return await self._client.verify(
                VerifyRequest(
                    session_id=session_id,
                    round=self._round,
                    draft_tokens=draft.tokens,
                    opening=opening(self._request, tokens),
                )
            )
        known = min(self._num_known, len(tokens))
        return await self._client.verify(
            VerifyRequest(
                session_id=session_id,
                round=self._round,
                prefix_len=known,
                prefix_crc=tokens_crc(tokens[:known]),
                new_tokens=tuple(tokens[known:]),
                draft_tokens=draft.tokens,
            )
        )

    def _verdict(self, reply: VerifyReply, draft: Draft) -> Verdict:
        if reply.accepted > len(draft):
            raise CloudProtocolError(f"{reply.accepted} of {len(draft)} draft tokens accepted")
        logprobs = tuple(item.value() for item in reply.logprobs or ())
        if self._request.num_top_logprobs is not None and len(logprobs) != reply.accepted + 1:
            raise CloudProtocolError(f"{len(logprobs)} log probabilities for {reply.accepted + 1} tokens")
        return Verdict(reply.accepted, reply.next_token, logprobs)


class CloudGenerator:
    """Lets the cloud make the rest of the answer: a round is one token of its stream. A stream that breaks is opened
    again after the committed tokens; as the noise hangs on seed and position, the text goes on as if nothing happened.
    """

    origin = Origin.CLOUD

    def __init__(self, client: CloudClient, request: GenerationRequest, reason: str = "") -> None:
        """reason: the policy's word for the handoff."""
        self._client = client
        self._request = request
        self._reason = reason
        self._stream: AsyncGenerator[TokenFrame, None] | None = None
        self._stack = AsyncExitStack()

    async def verify(self, tokens: Sequence[int], draft: Draft, sampler: Sampler, *, goes_on: bool = False) -> Verdict:
        """The next token. There is no draft to judge."""
        if draft.tokens:
            raise ValueError("a round that the cloud generates has no draft")
        frame = await retried(lambda: self._next(tokens), STREAM_ATTEMPTS)
        if frame.position != len(tokens):
            await self._hang_up()
            raise CloudProtocolError(f"a token for position {frame.position} instead of {len(tokens)}")
        return Verdict(0, frame.token, () if frame.logprobs is None else (frame.logprobs.value(),))

    async def release(self, tokens: Sequence[int]) -> None:
        """Close the stream: the cloud stops at once."""
        await self._hang_up()

    async def _next(self, tokens: Sequence[int]) -> TokenFrame:
        try:
            if self._stream is None:
                self._stream = await self._stack.enter_async_context(self._client.continuation(self._call(tokens)))
            return await anext(self._stream)
        except StopAsyncIteration as error:
            await self._hang_up()
            raise CloudRejectedError("the cloud's context is full") from error
        except BaseException:
            await self._hang_up()
            raise

    async def _hang_up(self) -> None:
        self._stream = None
        await self._stack.aclose()

    def _call(self, tokens: Sequence[int]) -> ContinueRequest:
        return ContinueRequest(
            session_id=secrets.token_urlsafe(12),
            opening=opening(self._request, tokens),
            max_tokens=self._request.max_tokens - (len(tokens) - len(self._request.prompt)),
            reason=self._reason,
        )


def opening(request: GenerationRequest, tokens: Sequence[int]) -> Opening:
    """What the cloud has to know of a request to go on after the committed tokens."""
    return Opening(
        tokens=tuple(tokens),
        prompt_len=len(request.prompt),
        sampling=request.sampling,
        stop_ids=tuple(sorted(request.stop_ids)),
        logprobs=request.num_top_logprobs,
    )
