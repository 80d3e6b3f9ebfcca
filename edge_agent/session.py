"""One request's loop: decide, draft, verify, commit, emit."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence

from edge_agent.controller import RoundController, RoundState
from edge_agent.decision import Decision, Mode
from edge_agent.drafters import Drafter
from edge_agent.request import GenerationRequest
from edge_agent.round import FinishReason, Origin, Round, TokenEvent
from edge_agent.verifier import Verifier
from shared.acceptance import NO_DRAFT, Draft, Verdict
from shared.errors import CloudError
from shared.sampling import Sampler


class Session:
    """Makes one answer. Iterate `run()`; leaving it early, by `break` or cancellation, gives everything back."""

    def __init__(
        self,
        request: GenerationRequest,
        controller: RoundController,
        drafter: Drafter,
        verifiers: Mapping[Mode, Verifier],
        context_length: int,
        *,
        cloud_drafter: Drafter | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """cloud_drafter: drafts for the cloud's larger target; `drafter` by default."""
        self.request = request
        self.controller = controller
        self._drafter = drafter
        self._cloud_drafter = cloud_drafter or drafter
        self._verifiers = verifiers
        self._context_length = context_length
        self._longest = min(len(request.prompt) + request.max_tokens, context_length)
        self._clock = clock
        self._tokens = list(request.prompt)
        self._sampler = Sampler(
            request.sampling, stop_ids=request.stop_ids, prompt=request.prompt, constraint=request.constraint
        )
        self._num_rounds = 0

    @property
    def tokens(self) -> Sequence[int]:
        """The prompt and every committed token."""
        return self._tokens

    async def run(self) -> AsyncGenerator[Round, None]:
        """The rounds, until the answer ends.

        Raises:
            EngineError: inference failed.
            CloudError: the cloud failed and the request forbids the device.
        """
        verifier: Verifier | None = None
        try:
            finished = False
            while not finished:
                state = self._state()
                decision = self.controller.decide(state)
                previous, verifier = verifier, self._verifiers[decision.mode]
                if previous not in (None, verifier):
                    await previous.release(self._tokens)
                try:
                    round = await self._round(state, decision, verifier)
                except CloudError:
                    decision = self.controller.cloud_failed(state)
                    await verifier.release(self._tokens)
                    verifier = self._verifiers[decision.mode]
                    round = await self._round(state, decision, verifier)
                self.controller.observe(state, round)
                finished = round.finish_reason is not None
                yield round
                if decision.pace_s and not finished:
                    await asyncio.sleep(decision.pace_s * len(round.tokens) - round.draft_s - round.verify_s)
        finally:
            self._drafter.close()
            self._cloud_drafter.close()
            if verifier is not None:
                await verifier.release(self._tokens)

    async def _round(self, state: RoundState, decision: Decision, verifier: Verifier) -> Round:
        started = self._clock()
        draft = await self._draft(state, decision) if decision.gamma else NO_DRAFT
        drafted = self._clock()
        verdict = await verifier.verify(self._tokens, draft, self._sampler, goes_on=decision.goes_on)
        verified = self._clock()
        events, finish_reason = self._commit(draft, verdict, verifier.origin)
        self._num_rounds += 1
        return Round(
            number=state.round,
            decision=decision,
            draft=draft,
            accepted=verdict.accepted,
            next_token=verdict.next_token,
            tokens=events,
            draft_s=drafted - started,
            verify_s=max(verified - drafted, verdict.pass_s),
            finish_reason=finish_reason,
        )

    async def _draft(self, state: RoundState, decision: Decision) -> Draft:
        # The last token of an answer needs no draft after it, and a draft past the context couldn't be checked.
        gamma = min(decision.gamma, state.num_left - 1, state.context_left - 1)
        if gamma <= 0:
            return NO_DRAFT
        drafter = self._cloud_drafter if decision.mode is Mode.CLOUD_VERIFY else self._drafter
        draft = await drafter.propose(self._tokens, gamma, self._sampler)
        return _head(draft, self.controller.trim(state, draft))

    def _commit(
        self, draft: Draft, verdict: Verdict, origin: Origin
    ) -> tuple[tuple[TokenEvent, ...], FinishReason | None]:
        """Take the verdict's tokens up to the first boundary: a stop id, the answer's limit, the context's end."""
        events: list[TokenEvent] = []
        for index, token in enumerate(verdict.tokens(draft)):
            if token in self.request.stop_ids:
                return tuple(events), FinishReason.STOP
            logprobs = verdict.logprobs[index] if verdict.logprobs else None
            token_origin = Origin.DRAFT if index < verdict.accepted else origin
            events.append(TokenEvent(len(self._tokens), token, token_origin, logprobs))
            self._tokens.append(token)
            self._sampler.append(token)
            if len(self._tokens) >= self._longest:
                return tuple(events), FinishReason.LENGTH
        return tuple(events), None

    def _state(self) -> RoundState:
        return RoundState(
            request=self.request,
            round=self._num_rounds,
            num_generated=len(self._tokens) - len(self.request.prompt),
            context_left=self._context_length - len(self._tokens),
        )


def _head(draft: Draft, length: int) -> Draft:
    """The first `length` tokens of a draft. What a drafter draws first doesn't depend on what it drew later."""
    if length >= len(draft):
        return draft
    return dataclasses.replace(
        draft,
        tokens=draft.tokens[:length],
        distributions=draft.distributions[:length],
        confidences=draft.confidences[:length],
    )
