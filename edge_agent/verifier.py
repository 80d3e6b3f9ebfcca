"""Who checks a draft: the target on this device, or (in cloud_client) the cloud's larger one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from edge_agent.round import Origin
from shared.acceptance import Draft, Verdict, common_prefix_length, judge
from shared.causal_lm import CausalLM
from shared.inference_thread import InferenceThread
from shared.sampling import Sampler

PREFILL_CHUNK = 128
"""Prompt tokens a job feeds at most: a cancelled request stops after one, other sessions get their
turn, and the buffers between layers stay small."""


class Verifier(Protocol):
    """Judges drafts of one request; an empty draft asks for the next token alone."""

    @property
    def origin(self) -> Origin:
        """What the recovered and bonus tokens are counted as."""

    async def verify(self, tokens: Sequence[int], draft: Draft, sampler: Sampler, *, goes_on: bool = False) -> Verdict:
        """Judge a draft that follows the committed `tokens`. goes_on: see `Decision`.

        Raises:
            EngineError: inference failed here.
            CloudError: the cloud did not answer.
        """

    async def release(self, tokens: Sequence[int]) -> None:
        """The next round goes elsewhere, or the request has ended: hold nothing beyond the committed `tokens`."""


class LocalVerifier:
    """The target model on this device, a pass when it is asked for one."""

    origin = Origin.TARGET

    def __init__(self, lm: CausalLM, thread: InferenceThread, num_top_logprobs: int | None = None) -> None:
        self._lm = lm
        self._thread = thread
        self._num_top_logprobs = num_top_logprobs

    async def verify(self, tokens: Sequence[int], draft: Draft, sampler: Sampler, *, goes_on: bool = False) -> Verdict:
        """One pass over the last committed token and the draft; a prompt is fed in chunks first."""
        await self._feed_prompt(tokens)
        return await self._thread.run(self._judge, tokens, draft, sampler)

    async def release(self, tokens: Sequence[int]) -> None:
        """Rewind to the committed tokens; the cache stays for a later request with the same beginning."""
        self._rewind(tokens)

    async def _feed_prompt(self, tokens: Sequence[int]) -> None:
        """All but the last chunk of what the cache lacks."""
        self._rewind(tokens)
        while len(tokens) - len(self._lm.tokens) > PREFILL_CHUNK:
            start = len(self._lm.tokens)
            await self._thread.run(self._lm.forward, tokens[start : start + PREFILL_CHUNK], 0)

    def _judge(self, tokens: Sequence[int], draft: Draft, sampler: Sampler) -> Verdict:
        feed = [*tokens[len(self._lm.tokens) :], *draft.tokens]
        logits = self._lm.forward(feed, len(draft) + 1)
        verdict = judge(logits, draft, sampler, len(tokens), num_top_logprobs=self._num_top_logprobs)
        self._lm.truncate(len(tokens) + verdict.accepted)
        return verdict

    def _rewind(self, tokens: Sequence[int]) -> None:
        """Keep what the cache shares with the tokens, less the last one: it has to be fed to get its logits."""
        self._lm.truncate(min(common_prefix_length(self._lm.tokens, tokens), len(tokens) - 1))
