"""Drafts from past answers: what is kept, for whom, and for how long."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from edge_agent.drafters import AnswerPool
from edge_agent.drafters.pool import MOST_TENANTS, TenantAnswers
from edge_agent.engine import Engine
from edge_agent.request import GenerationRequest, Privacy
from tests.toy_engine import Script, script_engine

ANSWER = "The quick brown fox jumps over the lazy dog."


def answer(pool: AnswerPool, requests: Sequence[GenerationRequest]) -> list[list[str]]:
    """Answer them one after the other with one engine; for each, who drafted its rounds."""

    async def drafters(engine: Engine, request: GenerationRequest) -> list[str]:
        async with engine.session(request) as session:
            return [round.draft.drafter async for round in session.run() if round.draft.tokens]

    async def all_of_them() -> list[list[str]]:
        engine = script_engine(Script(ANSWER), pool=pool)
        try:
            return [await drafters(engine, request) for request in requests]
        finally:
            await engine.close()

    return asyncio.run(all_of_them())


def request(number: int, tenant: str = "a", privacy: Privacy = Privacy.STANDARD) -> GenerationRequest:
    """Each with words of its own in the prompt, so that nothing but the pool knows the answer."""
    return GenerationRequest(
        (number, 256, *b"assistant\n"), 64, stop_ids=frozenset({257}), tenant=tenant, privacy=privacy
    )


def answers_of(pool: AnswerPool, tenant: str) -> TenantAnswers:
    answers = pool.answers(tenant)
    assert answers is not None
    return answers


def proposed(pool: AnswerPool, tenant: str, context: Sequence[int]) -> tuple[int, ...]:
    return answers_of(pool, tenant).propose(context, 100, "pool").tokens


def test_an_answer_is_drafted_from_the_one_before() -> None:
    first, second = answer(AnswerPool(1000), [request(1), request(2)])
    assert "pool" not in first
    assert second.count("pool") > 5


def test_another_tenant_gets_nothing_of_it() -> None:
    pool = AnswerPool(1000)
    _, second = answer(pool, [request(1, "a"), request(2, "b")])
    assert "pool" not in second
    pool.add("c", [*b"That is mine."])
    assert bytes(proposed(pool, "a", b"Th")) == ANSWER[2:].encode()
    assert bytes(proposed(pool, "c", b"Th")) == b"at is mine."
    assert pool.answers("d") is None


def test_an_on_device_request_neither_reads_nor_fills_the_pool() -> None:
    pool = AnswerPool(1000)
    _, private = answer(pool, [request(1), request(2, privacy=Privacy.ON_DEVICE)])
    assert "pool" not in private
    empty = AnswerPool(1000)
    answer(empty, [request(1, privacy=Privacy.ON_DEVICE)])
    assert empty.answers("a") is None


def test_a_pool_of_no_tokens_keeps_none() -> None:
    pool = AnswerPool(0)
    assert "pool" not in answer(pool, [request(1), request(2)])[1]
    assert pool.answers("a") is None


def test_drafts_end_where_a_past_answer_ended() -> None:
    pool = AnswerPool(1000)
    pool.add("a", [1, 2, 3, 4])
    pool.add("a", [5, 6, 7, 8])
    assert proposed(pool, "a", [9, 2, 3]) == (4,)
    assert proposed(pool, "a", [3, 4]) == ()


def test_the_pool_is_bounded_and_the_oldest_goes_first() -> None:
    pool = AnswerPool(100)
    for number in range(50):
        pool.add("a", [1000 + number] * 9)
        assert answers_of(pool, "a").num_tokens <= 100
    assert proposed(pool, "a", [1049])
    assert not proposed(pool, "a", [1000])
    pool.add("a", range(1000))
    assert answers_of(pool, "a").num_tokens <= 100
    assert proposed(pool, "a", [997]) == (998, 999)
    for tenant in range(MOST_TENANTS):
        pool.add(f"t{tenant}", [1, 2, 3])
    assert pool.answers("a") is None
    assert pool.answers("t0") is not None


def test_forgetting_empties_it() -> None:
    pool = AnswerPool(100)
    pool.add("a", [1, 2, 3])
    pool.forget()
    assert pool.answers("a") is None
