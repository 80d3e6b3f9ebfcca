"""The capacity simulation against a real service with a real model: 8 clients, as streams and as rounds with drafts.

Costs are measured in this process, one client's overhead and 8 clients' speed at the service, in turns, so that a slow
spell of the machine falls on all. Only ratios are judged, by their median; still, on a machine that does something else
they tell of that, so neither `make test` nor continuous integration runs this: `make test MARKS=quiet`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import pytest

from cloud_service.capacity.measure import measure_costs
from cloud_service.capacity.plan import Costs, Edges, Limits
from cloud_service.capacity.simulation import simulate
from shared.onnx_batch import OnnxBatchModel
from shared.protocol import tokens_crc
from shared.tokenizer import Tokenizer
from tests.processes import serving

logger = logging.getLogger(__name__)

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.quiet, pytest.mark.timeout(900)]

NUM_CLIENTS = 8
NUM_TOKENS = 160
"""So many that opening a session, which the simulation of its steady state leaves out, is a small part."""
GAMMA = 3
REPEATS = 5
TOLERANCE = 0.2
TASKS = ("Count to forty.", "List the planets.", "Write about rain.", "What is a tree?")
STREAMS = Edges(NUM_CLIENTS, 0, 0.0, 1.0, 1e6, 1.0, 0.0, 0.0, 0.0)
ROUNDS = dataclasses.replace(STREAMS, gamma=GAMMA)

Ask = Callable[[httpx.AsyncClient, int], Coroutine[Any, Any, int]]


@pytest.fixture(scope="module")
def cloud_url(smollm2_directory: Path) -> Iterator[str]:
    flags = ["serve", "--model", str(smollm2_directory), "--port", "0", "--context-length", "512", "--threads", "1"]
    with serving("cloud_service", flags) as url:
        yield url


@pytest.fixture(scope="module")
def prompts(smollm2_directory: Path) -> list[list[int]]:
    tokenizer = Tokenizer.from_directory(smollm2_directory)
    return [list(tokenizer.encode(f"{TASKS[i % len(TASKS)]} ({i})\n")) for i in range(NUM_CLIENTS)]


def costs_here(directory: Path) -> Callable[[], Costs]:
    model = OnnxBatchModel(directory, context_length=512, max_batch=NUM_CLIENTS, num_threads=1)
    return lambda: measure_costs(model)


def opening(prompt: list[int]) -> dict[str, Any]:
    return {"tokens": prompt, "prompt_len": len(prompt), "sampling": {"temperature": 0}}


def stream_of(prompts: list[list[int]]) -> Ask:
    async def ask(client: httpx.AsyncClient, number: int) -> int:
        body = {"session_id": f"capacity-{number}", "opening": opening(prompts[number]), "max_tokens": NUM_TOKENS}
        async with client.stream("POST", "/v1/continue", json=body) as response:
            return sum([line.count('"token"') async for line in response.aiter_lines()])

    return ask


def rounds_of(prompts: list[list[int]]) -> Ask:
    """Rounds, counted as if all drafts stood: whether they do changes nothing of what a pass costs."""

    async def ask(client: httpx.AsyncClient, number: int) -> int:
        session = f"capacity-{time.monotonic_ns()}-{number}"
        tokens = list(prompts[number])
        message: dict[str, Any] = {"opening": opening(tokens)}
        draft = tokens[-GAMMA:]
        for turn in range(NUM_TOKENS // (GAMMA + 1)):
            body = {"session_id": session, "round": turn, "draft_tokens": draft, **message}
            reply = (await client.post("/v1/verify", json=body)).json()
            tokens += [*draft[: reply["accepted"]], reply["next_token"]]
            message = {"prefix_len": len(tokens), "prefix_crc": tokens_crc(tokens)}
        return NUM_TOKENS

    return ask


async def rate(url: str, ask: Ask, num_clients: int) -> float:
    """Tokens a second of so many clients at once."""
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        started = time.perf_counter()
        counts = await asyncio.gather(*(ask(client, number) for number in range(num_clients)))
        return sum(counts) / (time.perf_counter() - started)


def predicted(costs: Costs, edges: Edges, alone: float) -> float:
    """Tokens a second of 8 clients, with the overhead of a message from what one client gets."""
    gamma = edges.gamma or 0
    pass_ms = costs.verify(gamma + 1) if gamma else costs.batch(1)
    message_ms = max(0.0, (gamma + 1) * 1e3 / alone - pass_ms)
    limits = Limits(max_running=NUM_CLIENTS)
    return simulate(dataclasses.replace(costs, message_ms=message_ms), limits, edges, 60.0).tokens_per_second


@pytest.mark.parametrize("edges", [STREAMS, ROUNDS], ids=["streams", "rounds"])
def test_8_clients_get_what_the_simulation_says(
    cloud_url: str, prompts: list[list[int]], smollm2_directory: Path, edges: Edges
) -> None:
    measure = costs_here(smollm2_directory)
    ask = rounds_of(prompts) if edges.gamma else stream_of(prompts)
    ratios = []
    for repeat in range(REPEATS + 1):
        costs = measure()
        alone = asyncio.run(rate(cloud_url, ask, 1))
        together = asyncio.run(rate(cloud_url, ask, NUM_CLIENTS))
        if repeat:  # The first one warms the caches.
            ratios.append(predicted(costs, edges, alone) / together)
            logger.info("tokens/s alone %.1f, of 8 %.1f; simulated / real %.2f", alone, together, ratios[-1])
    assert abs(median(ratios) - 1.0) <= TOLERANCE, ratios
