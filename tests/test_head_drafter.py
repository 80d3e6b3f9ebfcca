"""Drafting with a head: it reads the target's hidden states, keeps up with it, and changes nothing but the rounds."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence

import pytest

from edge_agent.answer_grammar import answer_grammar
from edge_agent.controller import FixedController, RoundState
from edge_agent.decision import Decision, Mode, Reason
from edge_agent.drafters import ChainDrafter, NgramDrafter
from edge_agent.drafters.base import Unpriced
from edge_agent.drafters.head import HeadDrafter
from edge_agent.drafters.model import CATCH_UP_CHUNK
from edge_agent.openai_schema import ChatRequest
from edge_agent.request import GenerationRequest
from edge_agent.round import FinishReason, Round
from edge_agent.session import Session
from edge_agent.verifier import LocalVerifier
from shared.grammar import GrammarCompiler
from shared.sampling import AcceptanceRule, Sampler, SamplingParams
from tests.fakes import TableHead, TableLM, inference
from tests.toy_engine import byte_tokenizer

PROMPT = (1, 2, 3, 1, 2)
VOCAB = 16


class Gammas(FixedController):
    """A gamma for each round."""

    def __init__(self, gamma: Callable[[int], int]) -> None:
        super().__init__(0)
        self._gamma_of = gamma

    def decide(self, state: RoundState) -> Decision:
        gamma = self._gamma_of(state.round)
        return Decision(Mode.LOCAL_SPECULATIVE if gamma else Mode.LOCAL_DIRECT, gamma, Reason.NOMINAL)


async def answer(
    request: GenerationRequest, target: TableLM, head: TableHead, gamma: Callable[[int], int] = lambda round: 4
) -> list[Round]:
    async with inference() as thread:
        verifier = LocalVerifier(target, thread)
        drafter = HeadDrafter(head, target, thread)
        verifiers = dict.fromkeys((Mode.LOCAL_DIRECT, Mode.LOCAL_SPECULATIVE), verifier)
        session = Session(request, Gammas(gamma), drafter, verifiers, target.context_length)
        return [round async for round in session.run()]


def tokens(rounds: Sequence[Round]) -> list[int]:
    return [event.token for round in rounds for event in round.tokens]


def direct(request: GenerationRequest, target: TableLM) -> list[int]:
    sampler = Sampler(request.sampling, stop_ids=request.stop_ids, prompt=request.prompt)
    sequence = list(request.prompt)
    for _ in range(request.max_tokens):
        token = sampler.draw(target.logits_after(sequence), len(sequence))
        if token in request.stop_ids:
            break
        sampler.append(token)
        sequence.append(token)
    return sequence[len(request.prompt) :]


def pair() -> tuple[TableLM, TableHead]:
    """A target, and a head that knows what it will say."""
    target = TableLM(VOCAB, seed=5)
    return target, TableHead(target)


@pytest.mark.parametrize("rule", AcceptanceRule)
@pytest.mark.parametrize("gamma", [1, 4, 8])
def test_a_head_that_agrees_is_always_accepted_once_the_prompt_was_read(rule: AcceptanceRule, gamma: int) -> None:
    target, head = pair()
    request = GenerationRequest(PROMPT, 1 + 20 * (gamma + 1), SamplingParams(seed=3, rule=rule))
    rounds = asyncio.run(answer(request, target, head, lambda round: gamma))
    assert [len(round.draft) for round in rounds] == [0] + [gamma] * 20
    assert all(round.accepted == gamma for round in rounds[1:])
    assert rounds[1].draft.drafter == "head"


def test_rounds_without_it_are_caught_up_in_one_call() -> None:
    target, head = pair()
    request = GenerationRequest(PROMPT, 60, SamplingParams(seed=11))
    rounds = asyncio.run(answer(request, target, head, lambda round: 0 if 3 <= round < 23 else 2))
    assert tokens(rounds) == direct(request, target)
    assert all(round.accepted == len(round.draft) for round in rounds)
    # One call for the prompt and the first token, and one for 20 rounds of one token and the round before them.
    assert head.fed[0] == len(PROMPT) + 1
    assert [fed for fed in head.fed if fed > 3] == [len(PROMPT) + 1, 23]


def test_a_long_prompt_is_taken_in_piece_by_piece() -> None:
    """So that other sessions get their turn in between."""
    target, head = pair()
    prompt = tuple(index % VOCAB for index in range(3 * CATCH_UP_CHUNK + 7))
    rounds = asyncio.run(answer(GenerationRequest(prompt, 20, SamplingParams(seed=1)), target, head))
    assert head.fed[:4] == [CATCH_UP_CHUNK] * 3 + [8]
    assert all(round.accepted == len(round.draft) for round in rounds)


def test_what_was_accepted_is_taken_in_again_with_the_targets_own_states() -> None:
    """Drafted tokens went in with the head's own features; `TableHead` would complain of any but the right ones."""
    target, head = pair()
    asyncio.run(answer(GenerationRequest(PROMPT, 31, SamplingParams(seed=3)), target, head, lambda round: 4))
    # Each round takes in the four accepted and the bonus, then draws on from its own three.
    assert head.fed == [6, 1, 1, 1] + [5, 1, 1, 1] * 5


def test_no_draft_where_the_target_has_not_been() -> None:
    async def proposed(fed: int) -> int:
        async with inference() as thread:
            target, head = pair()
            target.forward(PROMPT[:fed], 0)
            drafter = HeadDrafter(head, target, thread)
            return len(await drafter.propose(PROMPT, 3, Sampler(SamplingParams())))

    assert [asyncio.run(proposed(fed)) for fed in range(len(PROMPT) + 1)] == [0, 0, 0, 0, 3, 3]


def test_a_sequence_of_one_token_has_no_feature_before_it() -> None:
    target, head = pair()
    rounds = asyncio.run(answer(GenerationRequest((1,), 12, SamplingParams(seed=2)), target, head))
    assert [len(round.draft) for round in rounds[:2]] == [0, 4]
    assert all(round.accepted == len(round.draft) for round in rounds)


def test_a_cache_that_begins_alike_is_used_again_and_another_one_is_cut_back() -> None:
    target, head = pair()
    first = GenerationRequest(PROMPT, 20, SamplingParams(seed=4))
    asyncio.run(answer(first, target, head))
    held = list(head.tokens)
    other = GenerationRequest((*held[:10], (held[10] + 1) % VOCAB, 3), 20, SamplingParams(seed=4))
    head.fed.clear()
    rounds = asyncio.run(answer(other, target, head))
    assert tokens(rounds) == direct(other, target)
    assert head.fed[0] == 3, "the two tokens that differ, and the first of the answer"
    assert all(round.accepted == len(round.draft) for round in rounds)


def test_drafting_stops_where_one_more_is_not_worth_it() -> None:
    class Twice(Unpriced):
        def go_on(self, drafter: str, confidences: Sequence[float]) -> bool:
            assert drafter == "head"
            return len(confidences) < 2

    async def drafted() -> int:
        async with inference() as thread:
            target, head = pair()
            target.forward(PROMPT, 0)
            drafter = HeadDrafter(head, target, thread, Twice())
            return len(await drafter.propose(PROMPT, 8, Sampler(SamplingParams(temperature=0))))

    assert asyncio.run(drafted()) == 2


def test_confidence_is_the_heads_own_also_when_decoding_is_greedy() -> None:
    target, head = pair()
    rounds = asyncio.run(answer(GenerationRequest(PROMPT, 20, SamplingParams(temperature=0)), target, head))
    confidences = [value for round in rounds for value in round.draft.confidences]
    assert all(0 < value < 1 for value in confidences)


@pytest.mark.parametrize("num_steps", [1, 2, 3, 5, 8, 13, 21, 34])
def test_a_cancel_at_any_await_leaves_no_trace(num_steps: int) -> None:
    target, head = pair()
    request = GenerationRequest(PROMPT, 30, SamplingParams(seed=4))

    async def cancelled() -> None:
        task = asyncio.ensure_future(answer(request, target, head))
        for _ in range(num_steps):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(cancelled())
    rounds = asyncio.run(answer(request, target, head))
    assert tokens(rounds) == direct(request, target)
    assert all(round.accepted == len(round.draft) for round in rounds)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rule", AcceptanceRule)
def test_a_grammar_that_leaves_no_known_id_is_followed_all_the_same(rule: AcceptanceRule, temperature: float) -> None:
    """A head that knows no letter meets an answer that must be a word."""
    kinds = {"kind": {"enum": ["kettledrum", "flute"]}}
    schema = {"type": "object", "properties": kinds, "required": ["kind"], "additionalProperties": False}
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "kind", "schema": schema}},
    }
    grammar = answer_grammar(ChatRequest.model_validate(body))
    assert grammar is not None
    constraint = GrammarCompiler(byte_tokenizer()).compile(*grammar)
    target = TableLM(258, 5, sharpness=1.0)
    known = [token for token in range(258) if not chr(token).isalpha()]
    sampling = SamplingParams(seed=3, temperature=temperature, rule=rule)
    request = GenerationRequest(tuple(b"Say it: "), 200, sampling, frozenset({257}), constraint=constraint)
    rounds = asyncio.run(answer(request, target, TableHead(target, known)))
    assert json.loads(bytes(tokens(rounds)))["kind"] in ("kettledrum", "flute")
    assert rounds[-1].finish_reason is FinishReason.STOP
    assert sum(round.accepted for round in rounds) > 0


def test_the_cheaper_drafter_comes_first() -> None:
    async def drafters() -> list[str]:
        async with inference() as thread:
            target, head = pair()
            chain = ChainDrafter([NgramDrafter(), HeadDrafter(head, target, thread)])
            target.forward(PROMPT, 0)
            sampler = Sampler(SamplingParams())
            seen = (await chain.propose(PROMPT, 2, sampler)).drafter
            unseen = [*PROMPT[:-1], 9]
            target.truncate(len(PROMPT) - 1)
            return [seen, (await chain.propose(unseen, 2, sampler)).drafter]

    assert asyncio.run(drafters()) == ["ngram", "head"]
