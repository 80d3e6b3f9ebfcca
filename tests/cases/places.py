"""Where a draft can be judged, so that one test runs in both: on this device, and through the cloud's protocol."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest

from edge_agent.cloud_client import CloudClient
from edge_agent.cloud_verifier import CloudVerifier
from edge_agent.controller import RoundState
from edge_agent.decision import Mode
from edge_agent.drafters import Drafter, NullDrafter
from edge_agent.request import GenerationRequest
from edge_agent.round import FinishReason, Round
from edge_agent.session import Session
from edge_agent.verifier import LocalVerifier, Verifier
from shared.acceptance import Draft
from shared.causal_lm import CausalLM
from shared.inference_thread import InferenceThread
from shared.sampling import Sampler
from tests.cloud_edge import PlannedController, cloud_client
from tests.cloud_toy import SEED, VOCAB, TableDecoder, running_cloud
from tests.fakes import TableLM

CONTEXT = 32_768
DEVICE, CLOUD = "device", "cloud"
MODES = {DEVICE: Mode.LOCAL_SPECULATIVE, CLOUD: Mode.CLOUD_VERIFY}
NewDrafter = Callable[[InferenceThread], Drafter]

both_places = pytest.mark.parametrize("where", [DEVICE, CLOUD])


def no_drafts(thread: InferenceThread) -> Drafter:
    return NullDrafter()


class ScriptDrafter:
    """Proposes what it is told, right or wrong, as a drafter that doesn't draw."""

    name = "script"

    def __init__(self, propose: Callable[[Sequence[int], int], Sequence[int]]) -> None:
        self._propose = propose

    async def propose(self, tokens: Sequence[int], gamma: int, sampler: Sampler) -> Draft:
        return Draft(tuple(self._propose(tokens, gamma))[:gamma], self.name)

    def close(self) -> None:
        pass


def scripted(propose: Callable[[Sequence[int], int], Sequence[int]]) -> NewDrafter:
    return lambda thread: ScriptDrafter(propose)


class FixedLM(TableLM):
    """The same distribution in every place. probs: of the first ids; the others never come."""

    def __init__(self, probs: Sequence[float], context_length: int = CONTEXT) -> None:
        super().__init__(VOCAB, 0, context_length=context_length)
        padded = np.zeros(VOCAB)
        padded[: len(probs)] = probs
        with np.errstate(divide="ignore"):
            self._row = np.log(padded)

    def forward(self, tokens: Sequence[int], num_logits: int) -> np.ndarray:
        self.tokens.extend(tokens)
        return np.tile(self._row, (num_logits, 1))


class LmDecoder(TableDecoder):
    """A cloud's decoder around any toy."""

    def __init__(self, new_lm: Callable[[], TableLM]) -> None:
        super().__init__(context_length=CONTEXT)
        self._new_lm = new_lm

    def new_cache(self) -> TableLM:  # type: ignore[override]
        lm = self._new_lm()
        self.caches.append(lm)  # type: ignore[arg-type]
        return lm


def toy() -> TableLM:
    return TableLM(VOCAB, SEED, context_length=CONTEXT)


@dataclass
class Place:
    """A target, on the device or behind a real server, and sessions that it judges for."""

    where: str
    new_lm: Callable[[], TableLM]
    url: str | None

    def rounds(
        self,
        request: GenerationRequest,
        new_drafter: NewDrafter = no_drafts,
        gamma: int | Callable[[RoundState], int] = 4,
    ) -> list[Round]:
        """One answer's rounds. gamma: for each round where it is a function."""
        return self.answers([request], new_drafter, gamma)[0]

    def answers(
        self,
        requests: Sequence[GenerationRequest],
        new_drafter: NewDrafter = no_drafts,
        gamma: int | Callable[[RoundState], int] = 4,
    ) -> list[list[Round]]:
        """The rounds of several answers, one after the other."""

        async def all_of_them() -> list[list[Round]]:
            if self.url is None:
                return [await self._session(request, new_drafter, gamma, None) for request in requests]
            async with cloud_client(self.url) as client:
                return [await self._session(request, new_drafter, gamma, client) for request in requests]

        return asyncio.run(all_of_them())

    async def answer(
        self,
        request: GenerationRequest,
        new_drafter: NewDrafter = no_drafts,
        gamma: int | Callable[[RoundState], int] = 4,
    ) -> list[Round]:
        """The same for a running loop."""
        if self.url is None:
            return await self._session(request, new_drafter, gamma, None)
        async with cloud_client(self.url) as client:
            return await self._session(request, new_drafter, gamma, client)

    async def _session(
        self,
        request: GenerationRequest,
        new_drafter: NewDrafter,
        gamma: int | Callable[[RoundState], int],
        client: CloudClient | None,
    ) -> list[Round]:
        thread = InferenceThread()
        try:
            lm: CausalLM = self.new_lm()
            verifier: Verifier = LocalVerifier(lm, thread, request.num_top_logprobs)
            if client is not None:
                verifier = CloudVerifier(client, request)
            session = Session(
                request,
                Gammas(MODES[self.where], gamma),
                new_drafter(thread),
                {MODES[self.where]: verifier},
                CONTEXT,
            )
            return [round async for round in session.run()]
        finally:
            thread.stop()


class Gammas(PlannedController):
    """One mode; a gamma a round."""

    def __init__(self, mode: Mode, gamma: int | Callable[[RoundState], int]) -> None:
        super().__init__(lambda state: mode)
        self._gamma_of = gamma if callable(gamma) else lambda state: gamma

    def decide(self, state: RoundState):  # type: ignore[no-untyped-def]
        self._most = self._gamma_of(state)
        return super().decide(state)


@contextmanager
def open_place(where: str, new_lm: Callable[[], TableLM] = toy) -> Iterator[Place]:
    """The target in this place."""
    if where == DEVICE:
        yield Place(where, new_lm, None)
        return
    with running_cloud(LmDecoder(new_lm), context_length=CONTEXT, requests_per_minute=1_000_000) as cloud:
        yield Place(where, new_lm, cloud.url)


def tokens(rounds: Sequence[Round]) -> list[int]:
    return [event.token for round in rounds for event in round.tokens]


def direct(request: GenerationRequest, lm: TableLM | None = None) -> tuple[list[int], FinishReason]:
    """Plain target-only decoding, written out on its own."""
    lm = lm or toy()
    sampler = Sampler(request.sampling, stop_ids=request.stop_ids, prompt=request.prompt)
    sequence = list(request.prompt)
    out: list[int] = []
    while len(out) < request.max_tokens:
        token = sampler.draw(lm.logits_after(sequence), len(sequence))
        if token in request.stop_ids:
            return out, FinishReason.STOP
        sampler.append(token)
        sequence.append(token)
        out.append(token)
    return out, FinishReason.LENGTH


def total_variation(drawn: Sequence[int], probs: Sequence[float]) -> float:
    """Between the shares of what was drawn and the probabilities of ids 0, 1, …"""
    shares = np.bincount(drawn, minlength=VOCAB) / len(drawn)
    padded = np.zeros(len(shares))
    padded[: len(probs)] = probs
    return float(np.abs(shares - padded).sum() / 2)
