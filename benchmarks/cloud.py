"""What the cloud verifier can carry: batching, verification against generation, bytes; beside llama.cpp's server.

    python -m benchmarks.cloud --model DIR --draft DIR [--gguf FILE] [--clients 8] [--tokens 24] [--repeats 3]

Contenders are servers in processes of their own and take turns, so that a slow spell of the machine falls on all.
Prompts are warm (the caches hold them), so the figures are those of decoding. Nothing else should run meanwhile: then
the whole takes less than six minutes with the 1.5B on two cores.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmarks.servers import ServerProcess, free_port, llama_server
from edge_agent.cloud_client import CloudClient
from edge_agent.cloud_verifier import CloudGenerator, CloudVerifier
from edge_agent.drafters import ModelDrafter
from edge_agent.request import GenerationRequest
from shared.acceptance import Draft
from shared.inference_thread import InferenceThread
from shared.onnx_lm import OnnxModel
from shared.sampling import Sampler, SamplingParams
from shared.tokenizer import Tokenizer

TASKS = (
    "Write a Python function that parses an ISO 8601 date.",
    "Explain how a hash table handles collisions.",
    "Write a SQL query for the ten best customers of each month.",
    "What does the keyword `volatile` mean in Java?",
    "Write a shell script that backs up a directory every night.",
    "Explain the difference between a process and a thread.",
    "Write a C function that reverses a linked list.",
    "How does binary search work? Show it in Go.",
)
GREEDY = SamplingParams(temperature=0)
WARM_UP_TOKENS = 4


@dataclass(frozen=True)
class Run:
    """One measured run of one contender. busy_s: time that the cloud's model was computing."""

    tokens: int
    wall_s: float
    busy_s: float = 0.0
    num_bytes: int = 0

    @property
    def per_second(self) -> float:
        return self.tokens / self.wall_s

    @property
    def per_busy_second(self) -> float:
        return self.tokens / self.busy_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument("--gguf")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=24, help="of a stream; twice as many where one client verifies")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--gamma", type=int, nargs="*", default=[2, 3], help="none: capacity alone")
    arguments = parser.parse_args()
    tokenizer = Tokenizer.from_directory(arguments.model)
    prompts = [tuple(tokenizer.encode(_chat(task))) for task in TASKS]
    capacity(arguments, prompts)
    if arguments.gamma:
        asyncio.run(verification(arguments, tokenizer, prompts))


def _chat(task: str) -> str:
    return f"<|im_start|>user\n{task}<|im_end|>\n<|im_start|>assistant\n"


def cloud_server(name: str, model: Path, max_running: int) -> ServerProcess:
    port = free_port()
    command = [sys.executable, "-m", "cloud_service", "serve", "--model", str(model), "--port", str(port)]
    command += ["--context-length", "1024", "--max-running", str(max_running)]
    return ServerProcess(name, command, port, "/ready")


def capacity(arguments: argparse.Namespace, prompts: Sequence[tuple[int, ...]]) -> None:
    """Tokens a second of `clients` streams: as one batch, one at a time, and llama.cpp's slots."""
    chosen = [prompts[i % len(prompts)] for i in range(arguments.clients)]
    with ExitStack() as stack:
        servers = [
            stack.enter_context(cloud_server("batched", arguments.model, arguments.clients)),
            stack.enter_context(cloud_server("one at a time", arguments.model, 1)),
        ]
        if arguments.gguf:
            servers.append(
                stack.enter_context(
                    llama_server("llama.cpp", arguments.gguf, "--context", "1024", "--slots", str(arguments.clients))
                )
            )
        runs: dict[str, list[Run]] = {server.name: [] for server in servers}
        for repeat in range(arguments.repeats + 1):
            for server in servers:
                run = asyncio.run(_streams(server, chosen, arguments.tokens if repeat else WARM_UP_TOKENS))
                print(f"  {server.name}: {run.per_second:.1f} tokens a second", file=sys.stderr, flush=True)
                if repeat:  # The first one warms the caches.
                    runs[server.name].append(run)
    print(f"\n{arguments.clients} clients, {arguments.tokens} tokens each, median of {arguments.repeats} runs:")
    medians = {name: statistics.median(run.per_second for run in measured) for name, measured in runs.items()}
    for name, median in medians.items():
        print(f"  {name:20} {median:7.1f} tokens a second, {median / medians['one at a time']:.2f} x one at a time")


async def _streams(server: ServerProcess, prompts: Sequence[tuple[int, ...]], num_tokens: int) -> Run:
    async with httpx.AsyncClient(base_url=server.url, timeout=600) as client:
        ask = _ask_ours if server.name != "llama.cpp" else _ask_llama
        started = time.perf_counter()
        counts = await asyncio.gather(*(ask(client, i, prompt, num_tokens) for i, prompt in enumerate(prompts)))
        return Run(sum(counts), time.perf_counter() - started)


async def _ask_ours(client: httpx.AsyncClient, number: int, prompt: tuple[int, ...], num_tokens: int) -> int:
    opening = {"tokens": prompt, "prompt_len": len(prompt), "sampling": {"temperature": 0}}
    body = {"session_id": f"bench-{number:06}", "opening": opening, "max_tokens": num_tokens}
    async with client.stream("POST", "/v1/continue", json=body) as response:
        return sum([line.count('"token"') async for line in response.aiter_lines()])


async def _ask_llama(client: httpx.AsyncClient, number: int, prompt: tuple[int, ...], num_tokens: int) -> int:
    body = {
        "prompt": list(prompt),
        "n_predict": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "cache_prompt": True,
        "id_slot": number,
    }
    response = await client.post("/completion", json=body)
    return int(response.json()["tokens_predicted"])


async def verification(arguments: argparse.Namespace, tokenizer: Tokenizer, prompts: Sequence[tuple[int, ...]]) -> None:
    """One client: the cloud's tokens a busy second when it verifies a draft model's tokens, and when it makes them."""
    thread = InferenceThread()
    draft_model = OnnxModel(arguments.draft, context_length=1024)
    runs: dict[str, list[Run]] = {}
    try:
        with cloud_server("cloud", arguments.model, 8) as server:
            for repeat in range(arguments.repeats + 1):
                num_tokens = arguments.tokens * 2 if repeat else WARM_UP_TOKENS
                request = GenerationRequest(prompts[repeat % len(prompts)], num_tokens, GREEDY)
                for gamma in (0, *arguments.gamma):
                    async with _client(server, tokenizer) as client:
                        drafter = ModelDrafter(draft_model.new_cache(), thread)
                        run = await _answer(server, client, request, drafter, gamma)
                    print(f"  gamma {gamma}: {run}", file=sys.stderr, flush=True)
                    if repeat:
                        runs.setdefault(f"gamma {gamma}" if gamma else "generate", []).append(run)
    finally:
        thread.stop()
    alone = statistics.median(run.per_busy_second for run in runs["generate"])
    print("\none client, the draft model on the edge, without drafting ahead:")
    for name, measured in runs.items():
        busy = statistics.median(run.per_busy_second for run in measured)
        size = statistics.median(run.num_bytes / run.tokens for run in measured)
        speed = statistics.median(run.per_second for run in measured)
        print(
            f"  {name:10} {busy:6.1f} tokens a busy second ({busy / alone:.2f} x generate), "
            f"{speed:5.1f} tokens a second, {size:4.0f} bytes a token"
        )


@asynccontextmanager
async def _client(server: ServerProcess, tokenizer: Tokenizer) -> AsyncIterator[CloudClient]:
    client = CloudClient(server.url, tokenizer.fingerprint, tokenizer.vocab_size)
    try:
        await client.handshake()
        yield client
    finally:
        await client.close()


async def _answer(
    server: ServerProcess, client: CloudClient, request: GenerationRequest, drafter: ModelDrafter, gamma: int
) -> Run:
    sampler, tokens = Sampler(GREEDY), list(request.prompt)
    verifier = CloudVerifier(client, request) if gamma else CloudGenerator(client, request)
    # The first token pays for the prompt.
    tokens += (await verifier.verify(tokens, Draft(), sampler)).tokens(Draft())
    if gamma:
        await drafter.propose(tokens, 1, sampler)
    sent, received = client.traffic.sent, client.traffic.received
    busy, started, done = await _busy_s(server), time.perf_counter(), len(tokens)
    while len(tokens) < len(request.prompt) + request.max_tokens:
        draft = await drafter.propose(tokens, gamma, sampler) if gamma else Draft()
        tokens += (await verifier.verify(tokens, draft, sampler)).tokens(draft)
    wall_s = time.perf_counter() - started
    num_bytes = client.traffic.sent - sent + client.traffic.received - received
    run = Run(len(tokens) - done, wall_s, await _busy_s(server) - busy, num_bytes)
    await verifier.release(tokens)
    return run


async def _busy_s(server: ServerProcess) -> float:
    async with httpx.AsyncClient() as client:
        text = (await client.get(f"{server.url}/metrics")).text
    name = "souschef_cloud_busy_seconds_total"
    return next(float(line.split()[1]) for line in text.splitlines() if line.startswith(name))


if __name__ == "__main__":
    main()
