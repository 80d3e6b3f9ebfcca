"""Direct decoding that doesn't wait for the event loop between two passes.

Where no drafts are wanted it is known what the next pass will be fed: the token that this one draws. So that pass is
submitted before the session asks for it, and runs while the session takes in the token before. The cores are never
idle, and what the loop costs is hidden behind the model.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TypeVar

from edge_agent.request import GenerationRequest
from edge_agent.verifier import LocalVerifier
from shared.acceptance import NO_DRAFT, Draft, Verdict, judge
from shared.causal_lm import CausalLM
from shared.inference_thread import InferenceThread, Job
from shared.sampling import Sampler

R = TypeVar("R")


class LookAheadVerifier(LocalVerifier):
    """The target model on this device, one pass ahead of its session while its rounds go on as direct ones."""

    def __init__(self, lm: CausalLM, thread: InferenceThread, request: GenerationRequest) -> None:
        super().__init__(lm, thread, request.num_top_logprobs)
        self._stop_ids = request.stop_ids
        self._longest = min(len(request.prompt) + request.max_tokens, lm.context_length)
        self._ahead: Job[Verdict | None] | None = None
        self._follows: tuple[int, int] | None = None
        """What the pass ahead goes on from: the length of the sequence, its last token."""
        # The thread's own: what the latest pass drew, and the sampler after it.
        self._drawn: int | None = None
        self._drawn_with: Sampler | None = None

    async def verify(self, tokens: Sequence[int], draft: Draft, sampler: Sampler, *, goes_on: bool = False) -> Verdict:
        """See `Verifier.verify`. The pass ahead serves the round it was made for; any other begins anew. Where others
        wait for the model, none is begun ahead of them."""
        verdict = None
        if self._ahead is not None and not draft.tokens and (len(tokens), tokens[-1]) == self._follows:
            goes_on_now = goes_on and not self._thread.has_waiting(besides=self._ahead)
            verdict = await self._with_next(self._ahead, goes_on_now)
        if verdict is None:
            await self._drop()
            await self._feed_prompt(tokens)
            goes_on = goes_on and not draft.tokens and not self._thread.has_waiting()
            judge_it = self._judge_and_keep if goes_on else self._judge
            verdict = await self._with_next(self._thread.submit(judge_it, tokens, draft, sampler), goes_on)
        self._follows = len(tokens) + verdict.accepted + 1, verdict.next_token
        return verdict

    async def release(self, tokens: Sequence[int]) -> None:
        """Nothing runs ahead any more; see `LocalVerifier.release`."""
        await self._drop()
        await super().release(tokens)

    async def _with_next(self, current: Job[R], goes_on: bool) -> R:
        """The outcome of a pass, with the next one submitted behind it if it is to go on."""
        self._ahead = self._thread.submit(self._judge_ahead) if goes_on else None
        return await current.result()

    async def _drop(self) -> None:
        """Take back the pass ahead, or wait for its end."""
        if self._ahead is not None:
            await self._ahead.drop()
            self._ahead = None

    def _judge_and_keep(self, tokens: Sequence[int], draft: Draft, sampler: Sampler) -> Verdict:
        """What it draws is kept for the pass ahead."""
        self._drawn = None
        verdict = self._judge(tokens, draft, sampler)
        self._drawn, self._drawn_with = verdict.next_token, sampler.fork()
        self._drawn_with.append(verdict.next_token)
        return verdict

    def _judge_ahead(self) -> Verdict | None:
        """The pass after the latest one; None where that failed or has ended the answer."""
        started = time.perf_counter()
        drawn, sampler, self._drawn = self._drawn, self._drawn_with, None
        position = len(self._lm.tokens) + 1
        if drawn is None or sampler is None or drawn in self._stop_ids or position >= self._longest:
            return None
        logits = self._lm.forward([drawn], 1)
        verdict = judge(logits, NO_DRAFT, sampler, position, num_top_logprobs=self._num_top_logprobs)
        sampler.append(verdict.next_token)
        self._drawn = verdict.next_token
        return Verdict(0, verdict.next_token, verdict.logprobs, pass_s=time.perf_counter() - started)
