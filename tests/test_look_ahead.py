"""Looking ahead changes no token, wastes no pass at an answer's end, and leaves nothing running."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from edge_agent.controller import FixedController, RoundState
from edge_agent.decision import Decision, Mode, Reason
from edge_agent.drafters import NullDrafter
from edge_agent.look_ahead import LookAheadVerifier
from edge_agent.request import GenerationRequest
from edge_agent.round import FinishReason, Round
from edge_agent.session import Session
from edge_agent.verifier import LocalVerifier
from shared.acceptance import Draft
from shared.causal_lm import Logits
from shared.inference_thread import InferenceThread
from shared.sampling import Sampler, SamplingParams
from tests.fakes import TableLM, inference

PROMPT = (1, 2, 3)
PARAMS = [
    SamplingParams(temperature=0),
    SamplingParams(seed=7),
    SamplingParams(seed=7, top_p=0.9, repetition_penalty=1.3, frequency_penalty=0.5, min_tokens=5),
]


def new_session(request: GenerationRequest, lm: TableLM, thread: InferenceThread, *, ahead: bool = True) -> Session:
    verifier = LookAheadVerifier(lm, thread, request) if ahead else LocalVerifier(lm, thread, request.num_top_logprobs)
    return Session(
        request,
        FixedController(0),
        NullDrafter(),
        {Mode.LOCAL_DIRECT: verifier},
        lm.context_length,
    )


def answer(request: GenerationRequest, lm: TableLM, *, ahead: bool) -> list[Round]:
    async def run() -> list[Round]:
        async with inference() as thread:
            session = new_session(request, lm, thread, ahead=ahead)
            rounds = [round async for round in session.run()]
            assert list(lm.tokens) == list(session.tokens[: len(lm.tokens)])
            assert len(lm.tokens) < len(session.tokens)
            return rounds

    return asyncio.run(run())


def going_on(
    verifier: LookAheadVerifier, tokens: list[int], request: GenerationRequest
) -> Callable[[], Coroutine[Any, Any, None]]:
    """What appends the next token by a direct round that goes on."""
    sampler = Sampler(request.sampling)

    async def next_token() -> None:
        tokens.append((await verifier.verify(tokens, Draft(), sampler, goes_on=True)).next_token)
        sampler.append(tokens[-1])

    return next_token


@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("num_top_logprobs", [None, 2])
@pytest.mark.parametrize(("stop_ids", "context_length"), [(frozenset[int](), 4096), (frozenset([4]), 4096), ((), 20)])
def test_the_answer_and_the_number_of_passes_are_those_without(
    params: SamplingParams, num_top_logprobs: int | None, stop_ids: frozenset[int], context_length: int
) -> None:
    request = GenerationRequest(PROMPT, 60, params, frozenset(stop_ids), num_top_logprobs)
    lms = [TableLM(16, seed=5, context_length=context_length) for _ in range(2)]
    without, with_it = answer(request, lms[0], ahead=False), answer(request, lms[1], ahead=True)
    assert [round.tokens for round in with_it] == [round.tokens for round in without]
    assert with_it[-1].finish_reason is without[-1].finish_reason
    assert lms[1].num_forward_calls == lms[0].num_forward_calls
    if not stop_ids:
        assert with_it[-1].finish_reason is FinishReason.LENGTH


def test_the_next_pass_begins_before_it_is_asked_for_unless_others_wait() -> None:
    async def run() -> None:
        async with inference() as thread:
            lm = TableLM(16, seed=5)
            request = GenerationRequest(PROMPT, 60, SamplingParams(temperature=0))
            verifier, tokens = LookAheadVerifier(lm, thread, request), [*PROMPT]
            next_token = going_on(verifier, tokens, request)
            await next_token()
            await thread.run(lambda: None)  # Behind whatever was submitted.
            assert lm.tokens == tokens, "the token that was drawn has been fed"
            opened = threading.Event()
            running = asyncio.create_task(thread.run(opened.wait, 60))
            waiting = asyncio.create_task(thread.run(lambda: None))
            for _ in range(3):  # Each has been submitted, and one of them waits.
                await asyncio.sleep(0)
            assert thread.has_waiting()
            await next_token()
            opened.set()
            await asyncio.gather(running, waiting)
            await thread.run(lambda: None)
            assert lm.tokens == tokens[:-1], "it was the others' turn"
            await next_token()
            await verifier.release(tokens)

    asyncio.run(run())


def test_a_pass_ahead_that_has_not_begun_is_nobody_elses() -> None:
    async def run() -> None:
        async with inference() as thread:
            lm = TableLM(16, seed=5)
            request = GenerationRequest(PROMPT, 60, SamplingParams(temperature=0))
            verifier, tokens = LookAheadVerifier(lm, thread, request), [*PROMPT]
            next_token = going_on(verifier, tokens, request)
            await next_token()
            await thread.run(lambda: None)
            entered, opened = threading.Event(), threading.Event()

            def occupy() -> None:
                entered.set()
                opened.wait(60)

            running = asyncio.create_task(thread.run(occupy))
            assert await asyncio.to_thread(entered.wait, 60)
            await next_token()
            assert thread.has_waiting(), "the pass ahead, behind a job that runs"
            following = asyncio.create_task(next_token())
            await asyncio.sleep(0)
            opened.set()
            await asyncio.gather(running, following)
            await thread.run(lambda: None)
            assert lm.tokens == tokens, "the token that was drawn has been fed"
            await verifier.release(tokens)

    asyncio.run(run())


def test_what_was_not_foreseen_is_verified_from_the_committed_tokens() -> None:
    async def run() -> None:
        async with inference() as thread:
            request = GenerationRequest(PROMPT, 60, SamplingParams(temperature=0))
            verifier, lm = LookAheadVerifier(TableLM(16, seed=5), thread, request), TableLM(16, seed=5)
            plain, sampler = LocalVerifier(lm, thread), Sampler(request.sampling)
            first = (await verifier.verify(PROMPT, Draft(), sampler, goes_on=True)).next_token
            other = (first + 1) % 16
            for tokens, draft in (
                ([*PROMPT, other], Draft()),
                ([*PROMPT, first], Draft((3, 4))),
                ([*PROMPT, first], Draft()),
                (PROMPT, Draft()),
            ):
                verdict = await verifier.verify(tokens, draft, sampler, goes_on=True)
                assert verdict == await plain.verify(tokens, draft, sampler)
                if draft.tokens:  # Nothing is known of the pass after a draft.
                    tokens = [*tokens, *verdict.tokens(draft)]
                    after = await verifier.verify(tokens, Draft(), sampler, goes_on=True)
                    assert after == await plain.verify(tokens, Draft(), sampler)
            await verifier.release(PROMPT)

    asyncio.run(run())


class NowAndThen(FixedController):
    """A draft in every fourth round; the two after it go on as direct ones, the third says that it doesn't know."""

    def decide(self, state: RoundState) -> Decision:
        if state.round % 4 == 0:
            return Decision(Mode.LOCAL_SPECULATIVE, 2, Reason.PROBE)
        return Decision(Mode.LOCAL_DIRECT, 0, Reason.ACCEPTANCE_LOW, goes_on=state.round % 4 != 3)


class Fixed:
    """Always the same draft."""

    name = "fixed"

    async def propose(self, tokens: Sequence[int], gamma: int, sampler: Sampler) -> Draft:
        return Draft((7, 7)[:gamma], self.name)

    def close(self) -> None:
        pass


@pytest.mark.parametrize("params", PARAMS)
def test_drafts_between_direct_rounds_change_nothing_and_cost_no_pass(params: SamplingParams) -> None:
    async def answered(new_verifier: Callable[..., LocalVerifier], lm: TableLM, thread: InferenceThread) -> list[int]:
        verifier = new_verifier(lm, thread)
        modes = dict.fromkeys((Mode.LOCAL_DIRECT, Mode.LOCAL_SPECULATIVE), verifier)
        session = Session(request, NowAndThen(0), Fixed(), modes, lm.context_length)
        return [event.token for round in [round async for round in session.run()] for event in round.tokens]

    async def run() -> None:
        async with inference() as thread:
            plain, ahead = (TableLM(16, seed=5) for _ in range(2))
            expected = await answered(LocalVerifier, plain, thread)
            assert await answered(lambda lm, thread: LookAheadVerifier(lm, thread, request), ahead, thread) == expected
            assert len(expected) == 60
            assert ahead.num_forward_calls == plain.num_forward_calls

    request = GenerationRequest(PROMPT, 60, params)
    asyncio.run(run())


class FailingLM(TableLM):
    """Fails at one pass."""

    def forward(self, tokens: Sequence[int], num_logits: int) -> Logits:
        if self.num_forward_calls == 4:
            raise RuntimeError("this pass fails")
        return super().forward(tokens, num_logits)


def test_a_pass_that_fails_ahead_fails_the_round_it_was_for() -> None:
    async def run() -> None:
        async with inference() as thread:
            session = new_session(GenerationRequest(PROMPT, 60), FailingLM(16, seed=5), thread)
            rounds = []

            async def take_all() -> None:
                async for round in session.run():
                    rounds.append(round)

            with pytest.raises(RuntimeError, match="this pass fails"):
                await take_all()
            assert len(rounds) == 4

    asyncio.run(run())


@pytest.mark.parametrize("num_rounds", [1, 2, 5])
def test_leaving_takes_the_pass_ahead_along(num_rounds: int) -> None:
    async def run() -> None:
        async with inference() as thread:
            lm = TableLM(16, seed=5)
            session = new_session(GenerationRequest(PROMPT, 4000), lm, thread)
            rounds = session.run()
            for _ in range(num_rounds):
                await anext(rounds)
            await rounds.aclose()
            assert lm.tokens == list(session.tokens[:-1])
            calls = lm.num_forward_calls
            await thread.run(lambda: None)
            assert lm.num_forward_calls == calls <= num_rounds + 1

    asyncio.run(run())
