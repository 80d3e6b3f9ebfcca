"""Rounds of verification: exactly once, whatever is repeated, delayed, lost or moved to another replica."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable

from cloud_service.admission import Admission
from cloud_service.metrics import CloudMetrics
from cloud_service.session_store import Claim, SessionKey, SessionState, SessionStore, StoreUnavailableError
from cloud_service.sessions import LiveSession, LiveSessions
from cloud_service.target import Target
from shared.acceptance import Draft, Verdict
from shared.errors import ConflictError, GoneError, RequestError
from shared.protocol import Opening, VerifyReply, VerifyRequest, WireLogprobs, tokens_crc
from shared.sampling import Sampler

logger = logging.getLogger(__name__)


class RoundVerifier:
    """Serves /v1/verify. Holds live sessions, asks the store for others', records every round there.

    While the store is down the live copy is all there is, and is enough.
    """

    def __init__(
        self,
        target: Target,
        sessions: LiveSessions,
        store: SessionStore,
        admission: Admission,
        metrics: CloudMetrics,
        replica: str,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._target = target
        self._sessions = sessions
        self._store = store
        self._admission = admission
        self._metrics = metrics
        self._replica = replica
        self._clock = clock

    async def verify(self, tenant: str, request: VerifyRequest) -> VerifyReply:
        """Judge one draft.

        Raises:
            GoneError: the session's tokens aren't held here: open it anew.
            ConflictError: a round that is over, with another payload; or a session that has ended.
            BadRequestError, ContextLengthError, OverloadedError: as their names say.
        """
        started = self._clock()
        key = SessionKey(tenant, request.session_id)
        try:
            async with self._sessions.hold(key) as session:
                reply = await self._round(key, session, request, started)
                session.replied_at = self._sessions.now()
        except RequestError as error:
            self._metrics.verify_requests.labels(outcome=str(error.status)).inc()
            raise
        self._metrics.verify_requests.labels(outcome="ok").inc()
        self._metrics.verify_latency.observe(self._clock() - started)
        return reply

    async def end(self, tenant: str, session_id: str) -> None:
        """Forget a session, here and in the store."""
        key = SessionKey(tenant, session_id)
        async with self._sessions.hold(key) as session:
            session.state = None
            try:
                await self._store.end(key)
            except StoreUnavailableError:
                self._metrics.store_errors.inc()

    async def _round(
        self, key: SessionKey, session: LiveSession, request: VerifyRequest, started: float
    ) -> VerifyReply:
        request_hash = hashlib.sha256(request.encode()).hexdigest()
        if session.replied_at is not None:
            self._target.meter.rested((self._sessions.now() - session.replied_at) * 1e3)
        state = await self._state(key, session, request)
        if request.round <= state.round:
            return self._replay(state, request, request_hash)
        state = _extend(state, request)
        self._target.check(state.tokens, len(request.draft_tokens) + 1)
        self._target.check(request.draft_tokens, 0)
        async with self._admission.place():
            verdict = await self._judge(state, Draft(request.draft_tokens))
        reply = self._reply(state, request, verdict, started)
        tokens = (*state.tokens, *verdict.tokens(Draft(request.draft_tokens)))
        update = {"tokens": tokens, "round": request.round, "request_hash": request_hash, "reply": reply}
        await self._record(key, session, state.model_copy(update=update))
        return reply

    async def _state(self, key: SessionKey, session: LiveSession, request: VerifyRequest) -> SessionState:
        """The session as the request needs it: live, from the store, or out of the request's own opening."""
        live = session.state
        if live is not None and (request.round <= live.round or _continues(live, request)):
            return live
        if request.opening is not None:
            session.fence = (await self._open(key)).fence
            session.state = None
            return _opened(request.opening)
        claim = await self._claim(key)
        if claim is None or claim.state is None:
            self._metrics.session_rebuilds.labels(cause="lost").inc()
            raise GoneError("this session isn't held here; open it anew with its tokens", code="session_lost")
        if request.round > claim.state.round and not _continues(claim.state, request):
            self._metrics.session_rebuilds.labels(cause="diverged").inc()
            raise GoneError("this session has other tokens here; open it anew", code="session_diverged")
        self._metrics.session_rebuilds.labels(cause="moved").inc()
        session.fence, session.state = claim.fence, claim.state
        return claim.state

    def _replay(self, state: SessionState, request: VerifyRequest, request_hash: str) -> VerifyReply:
        if request.round == state.round and request_hash == state.request_hash and state.reply is not None:
            self._metrics.replays.inc()
            return state.reply
        raise ConflictError(f"round {request.round} is over; the last one done is {state.round}", code="stale_round")

    async def _judge(self, state: SessionState, draft: Draft) -> Verdict:
        sampler = Sampler(
            state.sampling,
            stop_ids=state.stop_ids,
            prompt=state.tokens[: state.prompt_len],
            generated=state.tokens[state.prompt_len :],
        )
        async with self._target.cache(state.tokens) as lm:
            verdict = await self._target.judge(lm, state.tokens, draft, sampler, state.num_top_logprobs)
        self._target.meter.judged(len(draft), verdict.accepted)
        self._metrics.verified_tokens.labels(result="accepted").inc(verdict.accepted)
        self._metrics.verified_tokens.labels(result="rejected").inc(len(draft) - verdict.accepted)
        self._metrics.generated_tokens.inc()
        return verdict

    def _reply(self, state: SessionState, request: VerifyRequest, verdict: Verdict, started: float) -> VerifyReply:
        stops = set(verdict.tokens(Draft(request.draft_tokens))) & set(state.stop_ids)
        return VerifyReply(
            round=request.round,
            accepted=verdict.accepted,
            next_token=verdict.next_token,
            finish="stop" if stops else None,
            logprobs=tuple(map(WireLogprobs.of, verdict.logprobs)) or None,
            timing_ms=round((self._clock() - started) * 1e3, 1),
            load=self._target.meter.load(self._sessions.num_active()),
        )

    async def _record(self, key: SessionKey, session: LiveSession, state: SessionState) -> None:
        try:
            await self._store.advance(key, self._replica, session.fence, state)
        except StoreUnavailableError:
            self._metrics.store_errors.inc()
        except RequestError:
            session.state = None  # Ended, or another replica's: nothing of it may be used here again.
            raise
        session.state = state

    async def _open(self, key: SessionKey) -> Claim:
        try:
            return await self._store.open(key, self._replica)
        except StoreUnavailableError:
            self._metrics.store_errors.inc()
            return Claim(fence=0)

    async def _claim(self, key: SessionKey) -> Claim | None:
        try:
            return await self._store.claim(key, self._replica)
        except StoreUnavailableError:
            self._metrics.store_errors.inc()
            return None


def _opened(opening: Opening) -> SessionState:
    return SessionState(
        tokens=opening.tokens,
        prompt_len=min(opening.prompt_len, len(opening.tokens)),
        sampling=opening.sampling,
        stop_ids=opening.stop_ids,
        num_top_logprobs=opening.logprobs,
    )


def _continues(state: SessionState, request: VerifyRequest) -> bool:
    """Whether the request goes on from tokens that the state really begins with."""
    if request.opening is not None:
        return False
    prefix = state.tokens[: request.prefix_len]
    return len(prefix) == request.prefix_len and bool(prefix) and tokens_crc(prefix) == request.prefix_crc


def _extend(state: SessionState, request: VerifyRequest) -> SessionState:
    """The tokens that the draft follows. What the edge never heard of (a lost reply's) is cut off."""
    if request.opening is not None:
        return state.model_copy(update={"tokens": (*state.tokens, *request.new_tokens)})
    return state.model_copy(update={"tokens": (*state.tokens[: request.prefix_len], *request.new_tokens)})
