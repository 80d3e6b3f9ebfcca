"""The command with a real model: what comes through the cloud is what the model itself says."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest

from edge_agent.cloud_client import CloudClient, CloudTimeouts
from edge_agent.cloud_verifier import CloudGenerator, CloudVerifier
from edge_agent.drafters import ModelDrafter, NgramDrafter
from edge_agent.request import GenerationRequest
from edge_agent.verifier import Verifier
from shared.acceptance import Draft
from shared.errors import TokenizerMismatchError
from shared.inference_thread import InferenceThread
from shared.onnx_lm import OnnxModel
from shared.sampling import Sampler, SamplingParams
from shared.tokenizer import Tokenizer
from tests.processes import serving

pytestmark = [pytest.mark.model, pytest.mark.slow]

GREEDY = SamplingParams(temperature=0)
NUM_TOKENS = 32
TASKS = ("Count from one to twenty.", "Write a haiku about rain.", "List the planets, then list them again.")


@pytest.fixture(scope="module")
def cloud_url(smollm2_directory: Path) -> Iterator[str]:
    flags = ["serve", "--model", str(smollm2_directory), "--port", "0", "--context-length", "512", "--threads", "1"]
    with serving("cloud_service", flags) as url:
        yield url


@pytest.fixture(scope="module")
def model(smollm2_directory: Path) -> OnnxModel:
    return OnnxModel(smollm2_directory, context_length=512, num_threads=1)


@pytest.fixture(scope="module")
def tokenizer(smollm2_directory: Path) -> Tokenizer:
    return Tokenizer.from_directory(smollm2_directory)


def prompt_of(tokenizer: Tokenizer, task: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(f"<|im_start|>user\n{task}<|im_end|>\n<|im_start|>assistant\n"))


async def answer(
    verifier: Verifier, request: GenerationRequest, drafter: ModelDrafter | NgramDrafter | None
) -> list[int]:
    sampler = Sampler(request.sampling, prompt=request.prompt)
    tokens, end = list(request.prompt), len(request.prompt) + request.max_tokens
    while len(tokens) < end:
        gamma = min(3, end - len(tokens) - 1)
        draft = await drafter.propose(tokens, gamma, sampler) if drafter and gamma else Draft()
        for token in (await verifier.verify(tokens, draft, sampler)).tokens(draft):
            tokens.append(token)
            sampler.append(token)
    await verifier.release(tokens)
    return tokens[len(request.prompt) :]


def assert_the_models_own(
    model: OnnxModel, prompt: tuple[int, ...], answered: list[int], never: Iterable[int] = ()
) -> None:
    """Every token is the model's first choice, or so near to it that the number of rows in a pass decides.

    never: ids that might not come.
    """
    whole = model.new_cache().forward([*prompt, *answered], len(answered) + 1).copy()
    single = model.new_cache()
    rows = [single.forward(list(prompt), 1)[0].copy()]
    rows += [single.forward([token], 1)[0].copy() for token in answered]
    noise = float(np.abs(whole - np.array(rows)).max())
    for row, token in zip(rows, answered, strict=False):
        row[list(never)] = -np.inf
        assert row.max() - row[token] <= 2 * noise


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("way", ["generate", "verify", "verify ngram", "verify model"])
def test_greedy_through_the_cloud_is_the_models_own(
    way: str, task: str, cloud_url: str, model: OnnxModel, tokenizer: Tokenizer
) -> None:
    request = GenerationRequest(prompt_of(tokenizer, task), NUM_TOKENS, GREEDY)
    thread = InferenceThread()

    async def scenario() -> list[int]:
        client = CloudClient(cloud_url, tokenizer.fingerprint, tokenizer.vocab_size)
        try:
            await client.handshake()
            drafters = {"verify ngram": NgramDrafter(), "verify model": ModelDrafter(model.new_cache(), thread)}
            verifier = CloudGenerator(client, request) if way == "generate" else CloudVerifier(client, request)
            return await answer(verifier, request, drafters.get(way))
        finally:
            await client.close()

    try:
        answered = asyncio.run(scenario())
    finally:
        thread.stop()
    assert len(answered) == NUM_TOKENS
    assert_the_models_own(model, request.prompt, answered)


def test_many_at_once_are_each_the_models_own(cloud_url: str, model: OnnxModel, tokenizer: Tokenizer) -> None:
    """16 different prompts, decoded in common passes, verified between them, with evictions."""
    tasks = [f"{task} Begin with the number {number}." for number in range(6) for task in TASKS][:16]
    requests = [GenerationRequest(prompt_of(tokenizer, task), NUM_TOKENS, GREEDY) for task in tasks]

    async def scenario() -> list[list[int]]:
        patient = CloudTimeouts(read_s=120)
        client = CloudClient(cloud_url, tokenizer.fingerprint, tokenizer.vocab_size, timeouts=patient)
        try:
            return await asyncio.gather(
                *(
                    answer(CloudVerifier(client, request), request, NgramDrafter())
                    if number % 2
                    else answer(CloudGenerator(client, request), request, None)
                    for number, request in enumerate(requests)
                )
            )
        finally:
            await client.close()

    for request, answered in zip(requests, asyncio.run(scenario()), strict=True):
        assert_the_models_own(model, request.prompt, answered)


def test_another_tokenizer_is_refused(cloud_url: str) -> None:
    async def scenario() -> None:
        client = CloudClient(cloud_url, "f" * 64, 151936)
        try:
            with pytest.raises(TokenizerMismatchError, match="tokenizers differ"):
                await client.handshake()
        finally:
            await client.close()

    asyncio.run(scenario())
