"""The model that everything here is about, with its caches and its thread."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from cloud_service.batcher import Batcher
from cloud_service.load import LoadMeter
from cloud_service.pass_costs import BatchDecoder, PassCosts, measure
from shared.acceptance import Draft, Verdict, judge
from shared.causal_lm import CausalLM, Logits
from shared.errors import BadRequestError, ContextLengthError
from shared.inference_thread import InferenceThread
from shared.kv_slots import SlotPool
from shared.protocol import MAX_GAMMA
from shared.sampling import Sampler

PREFILL_CHUNK = 32
"""Prompt tokens a job feeds at most: what other sessions wait for between two of their rounds."""


class Target:
    """The target model. Everything that touches it goes through `judge`."""

    def __init__(
        self,
        name: str,
        tokenizer_fingerprint: str,
        decoder: BatchDecoder[Any],
        thread: InferenceThread,
        batcher: Batcher[Any],
        slots: SlotPool[CausalLM],
        meter: LoadMeter,
        on_busy: Callable[[float], None] = lambda seconds: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """on_busy: told the seconds of every pass that isn't the batcher's."""
        self.name = name
        self.tokenizer_fingerprint = tokenizer_fingerprint
        self.thread = thread
        self.meter = meter
        self._decoder = decoder
        self._batcher = batcher
        self._slots = slots
        self._on_busy = on_busy
        self._clock = clock

    @property
    def vocab_size(self) -> int:
        """Ids it knows."""
        return self._decoder.vocab_size

    @property
    def context_length(self) -> int:
        """Most tokens of a session."""
        return self._decoder.context_length

    def check(self, tokens: Sequence[int], num_more: int) -> None:
        """Raise what makes these tokens and so many more impossible.

        Raises:
            BadRequestError: an id outside of the vocabulary.
            ContextLengthError: too many tokens.
        """
        if tokens and max(tokens) >= self.vocab_size:
            raise BadRequestError(f"token ids must be under {self.vocab_size}", param="tokens")
        if len(tokens) + num_more > self.context_length:
            raise ContextLengthError(f"the context holds {self.context_length} tokens", param="tokens")

    @asynccontextmanager
    async def stream(self, tokens: Sequence[int]) -> AsyncIterator[CausalLM]:
        """A cache for a continued answer, which counts as one for as long as it goes on."""
        self.meter.streams += 1
        try:
            async with self.cache(tokens) as lm:
                yield lm
        finally:
            self.meter.streams -= 1

    @asynccontextmanager
    async def cache(self, tokens: Sequence[int]) -> AsyncIterator[CausalLM]:
        """A cache with what it already shares with the tokens; afterwards it stays for whoever continues them.

        The caller holds a place of the admission, which has no more places than there are caches.
        """
        lm = self._slots.acquire(tokens)
        try:
            yield lm
        finally:
            self._slots.release(lm)

    async def judge(
        self,
        lm: CausalLM,
        tokens: Sequence[int],
        draft: Draft,
        sampler: Sampler,
        num_top_logprobs: int | None,
        *,
        comes_again: bool = False,
    ) -> Verdict:
        """Judge a draft that follows `tokens`; the cache then holds the tokens and the accepted drafts.

        The last pass may be one with those of other sessions. comes_again: the caller asks for the next token as soon
        as it has this one.
        """
        lm.truncate(min(len(lm.tokens), len(tokens) - 1))
        while len(tokens) - len(lm.tokens) > PREFILL_CHUNK:
            start = len(lm.tokens)
            await self.thread.run(self._forward, lm, tokens[start : start + PREFILL_CHUNK], 0)

        def decide(logits: Logits) -> Verdict:
            verdict = judge(logits, draft, sampler, len(tokens), num_top_logprobs=num_top_logprobs)
            lm.truncate(len(tokens) + verdict.accepted)
            return verdict

        rows = [*tokens[len(lm.tokens) :], *draft.tokens]
        return await self._batcher.forward(lm, rows, len(draft) + 1, decide, comes_again=comes_again)

    async def measure(self) -> PassCosts:
        """Learn what a pass over 1, 2, … positions costs here, of one session and of several together."""
        async with AsyncExitStack() as stack:
            caches = [await stack.enter_async_context(self.cache(())) for _ in range(self._batcher.max_batch)]
            positions = positions_worth_measuring(self.context_length)
            return await self.thread.run(measure, self._decoder, caches, positions)

    def _forward(self, lm: CausalLM, tokens: Sequence[int], num_logits: int) -> Logits:
        started = self._clock()
        logits = lm.forward(tokens, num_logits)
        self._on_busy(self._clock() - started)
        return logits


def positions_worth_measuring(context_length: int) -> int:
    """The longest draft and its bonus, as far as the context allows; c(1) … c(9) says enough of the curve."""
    return min(9, MAX_GAMMA + 1, context_length)
