"""The device's models, loaded and ready: opens a session for each request."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from edge_agent.cloud_link import CloudLink, NoCloud
from edge_agent.controller import RoundPolicy
from edge_agent.decision import Mode
from edge_agent.draft_ahead import DraftAhead
from edge_agent.drafters import (
    AnswerPool,
    ChainDrafter,
    Drafter,
    HeadDrafter,
    ModelDrafter,
    NgramDrafter,
    PoolDrafter,
    PredictionDrafter,
)
from edge_agent.look_ahead import LookAheadVerifier
from edge_agent.request import GenerationRequest, Privacy
from edge_agent.session import Session
from edge_agent.verifier import Verifier
from shared.causal_lm import CausalLM
from shared.chat_template import ChatTemplate
from shared.draft_head import DraftHead, HiddenStates
from shared.errors import TokenizerMismatchError
from shared.inference_thread import InferenceThread
from shared.kv_slots import SlotPool
from shared.tokenizer import Tokenizer


@dataclass(frozen=True)
class LocalModel:
    """A model of this device: its name, its words, and where its caches come from."""

    name: str
    tokenizer: Tokenizer
    slots: SlotPool[CausalLM]
    context_length: int
    weight_bytes: int

    @asynccontextmanager
    async def slot(self, tokens: tuple[int, ...]) -> AsyncIterator[CausalLM]:
        """A cache for one request, with what it already shares with the tokens."""
        with self.slots.slot(tokens) as lm:
            yield lm


class Engine:
    """Everything a request needs to be answered on this device. One a process; `close` ends its thread."""

    def __init__(
        self,
        target: LocalModel,
        draft: LocalModel | None,
        thread: InferenceThread,
        policy: RoundPolicy,
        chat_template: ChatTemplate,
        system_fingerprint: str = "",
        pool: AnswerPool | None = None,
        heads: SlotPool[DraftHead] | None = None,
    ) -> None:
        """pool: where past answers are kept to draft from; without one none are. heads: caches of the draft head that
        was trained for the target, whose own caches then keep their hidden states.

        Raises `TokenizerMismatchError` when the draft counts in other tokens than the target."""
        if draft is not None and draft.tokenizer.fingerprint != target.tokenizer.fingerprint:
            raise TokenizerMismatchError(
                f"{draft.name} can't draft for {target.name}: their tokenizers differ "
                f"({draft.tokenizer.fingerprint[:12]} and {target.tokenizer.fingerprint[:12]}); "
                "choose a draft model of the target's own family"
            )
        self.target = target
        self.draft = draft
        self.thread = thread
        self.chat_template = chat_template
        self.system_fingerprint = system_fingerprint
        self.created = int(time.time())
        self.policy = policy
        self.cloud: CloudLink = NoCloud()
        self.heads = heads
        self._pool = pool or AnswerPool(0)

    @property
    def model_name(self) -> str:
        """What the API calls this engine's model."""
        return self.target.name

    @property
    def tokenizer(self) -> Tokenizer:
        """The words of both models."""
        return self.target.tokenizer

    @property
    def context_length(self) -> int:
        """Most tokens of prompt and answer together."""
        return self.target.context_length

    @property
    def num_cached_tokens(self) -> int:
        """Tokens in all caches, of running requests and kept for later ones."""
        return sum(slots.num_cached_tokens for slots in self._slots)

    @asynccontextmanager
    async def session(self, request: GenerationRequest) -> AsyncIterator[Session]:
        """A session with caches of its own for as long as the block lasts."""
        async with AsyncExitStack() as stack:
            controller = self.policy.open(request)
            target_lm = await stack.enter_async_context(self.target.slot(request.prompt))
            lookups = self._lookups(request)
            models: list[Drafter] = []
            if self.heads is not None:
                assert isinstance(target_lm, HiddenStates), "a target with a head keeps its hidden states"
                head = stack.enter_context(self.heads.slot(request.prompt))
                models.append(HeadDrafter(head, target_lm, self.thread, controller))
            cloud_model = ModelDrafter(target_lm, self.thread, controller)
            if self.draft is not None:
                cloud_model = ModelDrafter(
                    await stack.enter_async_context(self.draft.slot(request.prompt)), self.thread, controller
                )
                models.append(cloud_model)
            ahead = DraftAhead(cloud_model)
            verifier = LookAheadVerifier(target_lm, self.thread, request)
            verifiers: dict[Mode, Verifier] = {
                Mode.LOCAL_DIRECT: verifier,
                Mode.LOCAL_SPECULATIVE: verifier,
                **await self.cloud.open(request, ahead),
            }
            session = Session(
                request,
                controller,
                ChainDrafter([*lookups, *models], controller),
                verifiers,
                self.context_length,
                cloud_drafter=ChainDrafter([*lookups, ahead], controller),
            )
            try:
                yield session
            finally:
                await verifier.release(session.tokens)  # The cache is given back: nothing may run on it.
                if request.privacy is not Privacy.ON_DEVICE:
                    self._pool.add(request.tenant, session.tokens[len(request.prompt) :])

    @property
    def _slots(self) -> list[SlotPool[Any]]:
        """The caches of everything that has one."""
        found = [self.target.slots, self.draft.slots if self.draft else None, self.heads]
        return [slots for slots in found if slots is not None]

    def _lookups(self, request: GenerationRequest) -> list[Drafter]:
        """The drafters that cost nothing."""
        lookups: list[Drafter] = [NgramDrafter(shortest=1)]
        if request.prediction:
            lookups.insert(0, PredictionDrafter(request.prediction, len(request.prompt)))
        answers = None if request.privacy is Privacy.ON_DEVICE else self._pool.answers(request.tenant)
        if answers is not None:
            lookups.append(PoolDrafter(answers))
        return lookups

    def forget_prompts(self, *, keep_answers: bool = False) -> None:
        """Drop what earlier requests left in free caches and in the pool, so that answers that are compared begin
        alike. keep_answers: leave the pool as it is."""
        if not keep_answers:
            self._pool.forget()
        for slots in self._slots:
            slots.forget()

    async def close(self) -> None:
        """Hang up, let the running job end and stop the thread."""
        await self.cloud.close()
        self.thread.stop()
