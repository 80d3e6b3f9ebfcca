"""Random models, drafters, gammas, rules, limits, stops and cancels: the loop's promises hold in all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from edge_agent.controller import FixedController, RoundState
from edge_agent.decision import Decision, Mode, Reason
from edge_agent.drafters import ChainDrafter, Drafter, ModelDrafter, NgramDrafter, NullDrafter, PredictionDrafter
from edge_agent.drafters.head import HeadDrafter
from edge_agent.request import GenerationRequest
from edge_agent.round import FinishReason, Round
from edge_agent.session import Session
from edge_agent.verifier import LocalVerifier
from shared.inference_thread import InferenceThread
from shared.sampling import AcceptanceRule, Sampler, SamplingParams
from tests.cases.places import ScriptDrafter
from tests.fakes import TableHead, TableLM
from tests.fuzzing import examples

VOCAB = 12
CONTEXT = 60


class RandomController(FixedController):
    """Another gamma and another length of each draft, every round."""

    def __init__(self, gammas: list[int], trims: list[int]) -> None:
        super().__init__(0)
        self._gammas = gammas
        self._trims = trims

    def decide(self, state: RoundState) -> Decision:
        gamma = self._gammas[state.round % len(self._gammas)]
        mode = Mode.LOCAL_SPECULATIVE if gamma else Mode.LOCAL_DIRECT
        return Decision(mode, gamma, Reason.NOMINAL)

    def draft_limit(self, drafter: str) -> int:
        return 16

    def trim(self, state: RoundState, draft: object) -> int:
        return self._trims[state.round % len(self._trims)]


NewDrafter = Callable[[TableLM, InferenceThread, GenerationRequest], Drafter]
DRAFTERS: dict[str, NewDrafter] = {
    "none": lambda lm, thread, request: NullDrafter(),
    "ngram": lambda lm, thread, request: NgramDrafter(),
    "prediction": lambda lm, thread, request: PredictionDrafter([1, 2, 3, 1, 2, 4], len(request.prompt)),
    "itself": lambda lm, thread, request: ModelDrafter(TableLM(VOCAB, lm.seed, context_length=CONTEXT), thread),
    "relative": lambda lm, thread, request: ModelDrafter(
        TableLM(VOCAB, 7, tied_to=lm, blend=0.4, context_length=CONTEXT), thread
    ),
    "short": lambda lm, thread, request: ModelDrafter(TableLM(VOCAB, lm.seed, context_length=20), thread),
    "head": lambda lm, thread, request: HeadDrafter(
        TableHead(TableLM(VOCAB, 7, tied_to=lm, blend=0.4, context_length=CONTEXT), range(VOCAB - 2)), lm, thread
    ),
    "short head": lambda lm, thread, request: HeadDrafter(
        TableHead(TableLM(VOCAB, lm.seed, context_length=20)), lm, thread
    ),
    "wild": lambda lm, thread, request: ScriptDrafter(
        lambda tokens, gamma: [(tokens[-1] * 7 + i) % VOCAB for i in range(gamma + 3)]
    ),
    "chain": lambda lm, thread, request: ChainDrafter(
        [NgramDrafter(), ModelDrafter(TableLM(VOCAB, 7, context_length=CONTEXT), thread)]
    ),
}

SAMPLING = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-6, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 3, 10**6]),
    top_p=st.sampled_from([1.0, 0.5, 1e-9]),
    min_p=st.sampled_from([0.0, 0.2, 1.0]),
    presence_penalty=st.sampled_from([0.0, 1.5, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 2.0, -1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.7, 0.3]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-100.0, 3.0, 100.0]), max_size=3),
    min_tokens=st.integers(0, 12),
    seed=st.integers(0, 2**64 - 1),
    rule=st.sampled_from(list(AcceptanceRule)),
)
REQUESTS = st.builds(
    GenerationRequest,
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30).map(tuple),
    max_tokens=st.integers(1, 50),
    sampling=SAMPLING,
    stop_ids=st.frozensets(st.integers(0, VOCAB - 1), max_size=3),
    num_top_logprobs=st.sampled_from([None, 0, 4]),
)


def expected(request: GenerationRequest, lm: TableLM) -> tuple[list[int], FinishReason]:
    sampler = Sampler(request.sampling, stop_ids=request.stop_ids, prompt=request.prompt)
    sequence = list(request.prompt)
    limit = min(request.max_tokens, CONTEXT - len(request.prompt))
    while len(sequence) - len(request.prompt) < limit:
        token = sampler.draw(lm.logits_after(sequence), len(sequence))
        if token in request.stop_ids:
            return sequence[len(request.prompt) :], FinishReason.STOP
        sampler.append(token)
        sequence.append(token)
    return sequence[len(request.prompt) :], FinishReason.LENGTH


async def play(
    request: GenerationRequest, lm: TableLM, drafter: str, controller: RandomController, cancel_after: int | None
) -> tuple[list[Round], Session]:
    thread = InferenceThread()
    try:
        verifier = LocalVerifier(lm, thread, request.num_top_logprobs)
        verifiers = dict.fromkeys((Mode.LOCAL_DIRECT, Mode.LOCAL_SPECULATIVE), verifier)
        session = Session(request, controller, DRAFTERS[drafter](lm, thread, request), verifiers, CONTEXT)
        rounds: list[Round] = []

        async def consume() -> None:
            async for round in session.run():
                rounds.append(round)

        task = asyncio.ensure_future(consume())
        if cancel_after is not None:
            for _ in range(cancel_after):
                await asyncio.sleep(0)
            task.cancel()
        await asyncio.gather(task, return_exceptions=cancel_after is not None)
        return rounds, session
    finally:
        thread.stop()


@settings(**examples(250))  # type: ignore[arg-type]
@given(
    request=REQUESTS,
    seed=st.integers(0, 50),
    drafter=st.sampled_from(sorted(DRAFTERS)),
    gammas=st.lists(st.integers(0, 16), min_size=1, max_size=6),
    trims=st.lists(st.integers(0, 16), min_size=1, max_size=4),
    cancel_after=st.none() | st.integers(0, 60),
)
def test_the_loop_keeps_its_promises(
    request: GenerationRequest, seed: int, drafter: str, gammas: list[int], trims: list[int], cancel_after: int | None
) -> None:
    lm = TableLM(VOCAB, seed, context_length=CONTEXT)
    rounds, session = asyncio.run(play(request, lm, drafter, RandomController(gammas, trims), cancel_after))
    events = [event for round in rounds for event in round.tokens]
    tokens = [event.token for event in events]
    start = len(request.prompt)
    assert [event.position for event in events] == list(range(start, start + len(tokens)))
    assert list(session.tokens[: start + len(tokens)]) == [*request.prompt, *tokens]
    assert list(lm.tokens) == list(session.tokens[: len(lm.tokens)]), "the cache holds committed tokens alone"
    assert not set(tokens) & request.stop_ids
    assert all((event.logprobs is None) == (request.num_top_logprobs is None) for event in events)
    for round in rounds:
        assert 0 <= round.accepted <= len(round.draft) <= 16
        assert len(round.tokens) <= round.accepted + 1
    answer, reason = expected(request, lm)
    if request.sampling.greedy or request.sampling.rule is AcceptanceRule.COUPLED:
        assert tokens == answer[: len(tokens)]
    if cancel_after is None:
        assert rounds[-1].finish_reason is not None
        assert all(round.finish_reason is None for round in rounds[:-1])
        if request.sampling.greedy or request.sampling.rule is AcceptanceRule.COUPLED:
            assert (tokens, rounds[-1].finish_reason) == (answer, reason)
