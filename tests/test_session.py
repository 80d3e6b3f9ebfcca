"""The loop on exact models: speculation changes nothing but the number of rounds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_agent.controller import FixedController, RoundState
from edge_agent.decision import Decision, Mode, Reason
from edge_agent.drafters import ChainDrafter, Drafter, ModelDrafter, NgramDrafter, NullDrafter, PredictionDrafter
from edge_agent.drafters.head import HeadDrafter
from edge_agent.request import GenerationRequest, Speculation
from edge_agent.round import FinishReason, Origin, Round
from edge_agent.session import Session
from edge_agent.verifier import LocalVerifier
from shared.acceptance import Draft
from shared.inference_thread import InferenceThread
from shared.sampling import AcceptanceRule, Sampler, SamplingParams
from tests.fakes import TableHead, TableLM, inference

PROMPT = (1, 2, 3, 1, 2)
DrafterMaker = Callable[[TableLM, InferenceThread], Drafter]


class ScriptDrafter:
    """Proposes whatever it is told, right or wrong."""

    name = "script"

    def __init__(self, propose: Callable[[Sequence[int], int], Sequence[int]]) -> None:
        self._propose = propose
        self.closed = False

    async def propose(self, tokens: Sequence[int], gamma: int, sampler: Sampler) -> Draft:
        return Draft(tuple(self._propose(tokens, gamma))[:gamma], self.name)

    def close(self) -> None:
        self.closed = True


DRAFTERS: dict[str, DrafterMaker] = {
    "none": lambda target, thread: NullDrafter(),
    "ngram": lambda target, thread: NgramDrafter(),
    "prediction": lambda target, thread: PredictionDrafter([4, 5, 6, 7, 8, 9, 4, 5], len(PROMPT)),
    "itself": lambda target, thread: ModelDrafter(TableLM(16, target.seed), thread),
    "relative": lambda target, thread: ModelDrafter(TableLM(16, 99, tied_to=target, blend=0.3), thread),
    "stranger": lambda target, thread: ModelDrafter(TableLM(16, 77), thread),
    "wrong": lambda target, thread: ScriptDrafter(lambda tokens, gamma: [0] * gamma),
    "chain": lambda target, thread: ChainDrafter([NgramDrafter(), ModelDrafter(TableLM(16, 77), thread)]),
    "head": lambda target, thread: HeadDrafter(TableHead(TableLM(16, 99, tied_to=target, blend=0.3)), target, thread),
    "trimmed head": lambda target, thread: HeadDrafter(TableHead(target, range(0, 16, 2)), target, thread),
    "chain with a head": lambda target, thread: ChainDrafter(
        [NgramDrafter(), HeadDrafter(TableHead(target), target, thread)]
    ),
}


async def answer(
    request: GenerationRequest,
    gamma: int,
    make_drafter: DrafterMaker = DRAFTERS["none"],
    *,
    target: TableLM | None = None,
    controller: FixedController | None = None,
) -> list[Round]:
    async with inference() as thread:
        lm = target or TableLM(16, seed=5)
        verifier = LocalVerifier(lm, thread, request.num_top_logprobs)
        session = Session(
            request,
            controller or FixedController(gamma),
            make_drafter(lm, thread),
            dict.fromkeys((Mode.LOCAL_DIRECT, Mode.LOCAL_SPECULATIVE), verifier),
            lm.context_length,
        )
        rounds = [round async for round in session.run()]
        assert list(lm.tokens) == list(session.tokens[: len(lm.tokens)])
        assert len(lm.tokens) <= len(session.tokens)
        return rounds


def tokens(rounds: list[Round]) -> list[int]:
    return [event.token for round in rounds for event in round.tokens]


def direct(request: GenerationRequest, target: TableLM | None = None) -> tuple[list[int], FinishReason]:
    """Plain target-only decoding, written out on its own."""
    lm = target or TableLM(16, seed=5)
    sampler = Sampler(request.sampling, stop_ids=request.stop_ids, prompt=request.prompt)
    sequence = list(request.prompt)
    out: list[int] = []
    while len(out) < request.max_tokens and len(sequence) < lm.context_length:
        token = sampler.draw(lm.logits_after(sequence), len(sequence))
        if token in request.stop_ids:
            return out, FinishReason.STOP
        sampler.append(token)
        sequence.append(token)
        out.append(token)
    return out, FinishReason.LENGTH


def run(rounds: object) -> list[Round]:
    return asyncio.run(rounds)  # type: ignore[arg-type]


@pytest.mark.parametrize("gamma", range(9))
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize(
    "sampling", [SamplingParams(temperature=0), SamplingParams(seed=7, top_p=0.9)], ids=["greedy", "coupled"]
)
def test_text_depends_on_seed_and_target_alone(gamma: int, drafter: str, sampling: SamplingParams) -> None:
    request = GenerationRequest(PROMPT, 40, sampling)
    assert tokens(run(answer(request, gamma, DRAFTERS[drafter]))) == direct(request)[0]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    gamma=st.integers(0, 8),
    drafter=st.sampled_from(sorted(DRAFTERS)),
    penalty=st.sampled_from([0.0, 1.5]),
    repetition=st.sampled_from([1.0, 1.3]),
    min_tokens=st.integers(0, 12),
    temperature=st.sampled_from([0.0, 0.7]),
    stop=st.sets(st.integers(0, 15), max_size=4),
)
def test_penalties_and_stops_change_nothing_either(
    seed: int,
    gamma: int,
    drafter: str,
    penalty: float,
    repetition: float,
    min_tokens: int,
    temperature: float,
    stop: set[int],
) -> None:
    sampling = SamplingParams(
        temperature=temperature,
        seed=seed,
        frequency_penalty=penalty,
        repetition_penalty=repetition,
        min_tokens=min_tokens,
        logit_bias={3: 1.5},
    )
    request = GenerationRequest(PROMPT, 24, sampling, frozenset(stop))
    rounds = run(answer(request, gamma, DRAFTERS[drafter]))
    expected, finish_reason = direct(request)
    assert tokens(rounds) == expected
    assert rounds[-1].finish_reason is finish_reason


@pytest.mark.parametrize("rule", AcceptanceRule)
@pytest.mark.parametrize("gamma", [1, 4, 8])
def test_a_draft_model_equal_to_the_target_is_always_accepted(rule: AcceptanceRule, gamma: int) -> None:
    """Also the proof that the draft's cache takes in the last draft token after full acceptance."""
    request = GenerationRequest(PROMPT, 200, SamplingParams(seed=3, rule=rule))
    rounds = run(answer(request, gamma, DRAFTERS["itself"]))
    assert all(round.accepted == len(round.draft) for round in rounds)
    assert len(rounds) == -(-200 // (gamma + 1))


@pytest.mark.parametrize("boundary", range(8))
@pytest.mark.parametrize("gamma", [1, 4, 8])
def test_a_stop_or_limit_at_every_offset_of_a_round(boundary: int, gamma: int) -> None:
    free, _ = direct(GenerationRequest(PROMPT, 60, SamplingParams(seed=2)))
    first_at = next(i for i in range(boundary, 60) if free[i] not in free[:i])
    stopped = GenerationRequest(PROMPT, 60, SamplingParams(seed=2), frozenset({free[first_at]}))
    rounds = run(answer(stopped, gamma, DRAFTERS["itself"]))
    assert tokens(rounds) == free[:first_at]
    assert rounds[-1].finish_reason is FinishReason.STOP
    limited = GenerationRequest(PROMPT, boundary + 1, SamplingParams(seed=2))
    rounds = run(answer(limited, gamma, DRAFTERS["itself"]))
    assert tokens(rounds) == free[: boundary + 1]
    assert rounds[-1].finish_reason is FinishReason.LENGTH


def test_a_stop_beyond_the_limit_is_a_limit() -> None:
    free, _ = direct(GenerationRequest(PROMPT, 6, SamplingParams(seed=2)))
    request = GenerationRequest(PROMPT, 5, SamplingParams(seed=2), frozenset({free[5]}) - set(free[:5]))
    rounds = run(answer(request, 8, DRAFTERS["itself"]))
    assert (tokens(rounds), rounds[-1].finish_reason) == (free[:5], FinishReason.LENGTH)


@pytest.mark.parametrize("context", range(len(PROMPT) + 1, len(PROMPT) + 12))
@pytest.mark.parametrize("drafter", ["itself", "ngram", "wrong", "chain with a head"])
def test_the_end_of_the_context_ends_the_answer(context: int, drafter: str) -> None:
    target = TableLM(16, seed=5, context_length=context)
    request = GenerationRequest(PROMPT, 60, SamplingParams(seed=2))
    rounds = run(answer(request, 4, DRAFTERS[drafter], target=target))
    assert tokens(rounds) == direct(request, target)[0]
    assert len(tokens(rounds)) == context - len(PROMPT)
    assert rounds[-1].finish_reason is FinishReason.LENGTH


def test_gamma_falls_to_nothing_and_comes_back() -> None:
    """After 20 tokens without a draft the draft's cache catches up, and acceptance is whole again at once."""

    class Switching(FixedController):
        def decide(self, state: RoundState) -> Decision:
            if 5 <= state.round < 25:
                return Decision(Mode.LOCAL_DIRECT, 0, Reason.DEVICE_WARM)
            return Decision(Mode.LOCAL_SPECULATIVE, 4, Reason.NOMINAL)

    request = GenerationRequest(PROMPT, 100, SamplingParams(seed=11))
    rounds = run(answer(request, 4, DRAFTERS["itself"], controller=Switching(4)))
    assert tokens(rounds) == direct(request)[0]
    assert [len(round.draft) for round in rounds[5:25]] == [0] * 20
    assert all(round.accepted == len(round.draft) for round in rounds)


def test_rejection_sampling_follows_the_target_over_whole_answers() -> None:
    """Total variation of the third token's distribution, over many seeds, against target-only sampling."""
    target = TableLM(6, seed=5, sharpness=1.0)

    async def third_tokens() -> list[int]:
        out = []
        async with inference() as thread:
            for seed in range(20_000):
                request = GenerationRequest(PROMPT, 3, SamplingParams(seed=seed, rule=AcceptanceRule.REJECTION))
                verifier = LocalVerifier(target, thread)
                drafter = ScriptDrafter(lambda tokens, gamma: [(tokens[-1] + i + 1) % 6 for i in range(gamma)])
                session = Session(request, FixedController(2), drafter, {Mode.LOCAL_SPECULATIVE: verifier}, 4096)
                out.append([event.token async for round in session.run() for event in round.tokens][2])
        return out

    shares = [out / 20_000 for out in _counts(asyncio.run(third_tokens()), 6)]
    expected = [0.0] * 6
    for path, weight in _paths(target, list(PROMPT), 3):
        expected[path[-1]] += weight
    assert sum(abs(a - b) for a, b in zip(shares, expected, strict=True)) / 2 < 0.02


def _counts(values: list[int], size: int) -> list[int]:
    return [values.count(i) for i in range(size)]


def _paths(target: TableLM, sequence: list[int], depth: int) -> list[tuple[list[int], float]]:
    if not depth:
        return [(sequence, 1.0)]
    distribution = Sampler(SamplingParams()).distribution(target.logits_after(sequence))
    return [
        (path, weight * float(p))
        for token, p in zip(distribution.ids, distribution.probs, strict=True)
        for path, weight in _paths(target, [*sequence, int(token)], depth - 1)
    ]


def test_origins_positions_and_usage_add_up() -> None:
    request = GenerationRequest(PROMPT, 50, SamplingParams(seed=7), num_top_logprobs=2)
    rounds = run(answer(request, 4, DRAFTERS["relative"]))
    events = [event for round in rounds for event in round.tokens]
    assert [event.position for event in events] == list(range(len(PROMPT), len(PROMPT) + 50))
    drafted = [event for event in events if event.origin is Origin.DRAFT]
    assert 0 < len(drafted) <= sum(round.accepted for round in rounds)
    assert all(event.logprobs is not None and len(event.logprobs.top) == 2 for event in events)
    assert [round.number for round in rounds] == list(range(len(rounds)))


def test_speculation_off_drafts_nothing() -> None:
    request = GenerationRequest(PROMPT, 10, SamplingParams(seed=7), speculation=Speculation.OFF)
    rounds = run(answer(request, 4, DRAFTERS["itself"]))
    assert len(rounds) == 10
    assert all(not len(round.draft) for round in rounds)


def test_leaving_early_rewinds_the_cache_and_closes_the_drafter() -> None:
    async def leave_after(num_rounds: int) -> None:
        async with inference() as thread:
            target = TableLM(16, seed=5)
            drafter = ScriptDrafter(lambda tokens, gamma: [0] * gamma)
            session = Session(
                GenerationRequest(PROMPT, 50, SamplingParams(seed=7)),
                FixedController(4),
                drafter,
                {Mode.LOCAL_SPECULATIVE: LocalVerifier(target, thread)},
                4096,
            )
            rounds = session.run()
            for _ in range(num_rounds):
                await anext(rounds)
            await rounds.aclose()
            assert drafter.closed
            assert list(target.tokens) == list(session.tokens[: len(target.tokens)])

    for num_rounds in (1, 3):
        asyncio.run(leave_after(num_rounds))


def test_cancelling_stops_the_work_within_a_round() -> None:
    async def cancelled() -> None:
        async with inference() as thread:
            target = TableLM(16, seed=5)
            session = Session(
                GenerationRequest(PROMPT, 4000, SamplingParams(seed=7)),
                FixedController(0),
                NullDrafter(),
                {Mode.LOCAL_DIRECT: LocalVerifier(target, thread)},
                4096,
            )

            begun = asyncio.Event()

            async def consume() -> None:
                async for _ in session.run():
                    begun.set()

            task = asyncio.create_task(consume())
            await begun.wait()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            calls = target.num_forward_calls
            await asyncio.sleep(0.05)
            assert target.num_forward_calls == calls
            assert calls < 4000

    asyncio.run(cancelled())
