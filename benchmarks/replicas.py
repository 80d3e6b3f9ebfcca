"""What a second replica gives on the cores of one machine, and what the way through Ray Serve costs.

    python -m benchmarks.replicas --model DIR [--clients 8] [--tokens 32] [--repeats 3] [--ray]

Two replicas on separate machines have twice the cores and the memory; here they share both, so this is the least that a
second one gives. Contenders take turns. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import psutil
import yaml

from benchmarks.servers import ServerProcess, free_port
from edge_agent.cloud_client import CloudClient
from edge_agent.cloud_verifier import CloudGenerator, CloudVerifier
from edge_agent.drafters import NgramDrafter
from edge_agent.request import GenerationRequest
from shared.acceptance import Draft
from shared.sampling import Sampler, SamplingParams
from shared.tokenizer import Tokenizer

CONTEXT = 512
GAMMA = 3
GREEDY = SamplingParams(temperature=0)
SERVE_CONFIG = Path(__file__).parent.parent / "deploy/ray/serve.yaml"
THINGS = ("rain", "bread", "sea", "bridge", "winter", "train", "salt", "moon")


@dataclass(frozen=True)
class Contender:
    """Clients take the addresses in turn."""

    name: str
    urls: Sequence[str]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ray", action="store_true", help="one replica on Ray Serve too")
    arguments = parser.parse_args()
    tokenizer = Tokenizer.from_directory(arguments.model)
    requests = [_request(tokenizer, i, arguments.tokens) for i in range(arguments.clients)]
    cores = psutil.cpu_count(logical=False) or 1

    def plain(threads: int) -> str:
        return stack.enter_context(_plain(arguments.model, threads)).url

    with ExitStack() as stack:
        contenders = [
            Contender("1 replica, all cores", [plain(cores)]),
            Contender("2 replicas, half the cores each", [plain(max(1, cores // 2)) for _ in range(2)]),
        ]
        if arguments.ray:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            server = stack.enter_context(_on_ray(arguments.model, cores, folder))
            contenders.append(Contender("1 replica, all cores, on Ray Serve", [server.url]))
        for drafts in (False, True):
            speeds: dict[str, list[float]] = {contender.name: [] for contender in contenders}
            for repeat in range(arguments.repeats + 1):
                for contender in contenders:
                    speed = asyncio.run(_tokens_per_second(contender, tokenizer, requests, drafts))
                    if repeat:  # The first one warms the caches.
                        speeds[contender.name].append(speed)
            _report(f"{arguments.clients} {'verified sessions' if drafts else 'streams'}", speeds)


def _report(title: str, speeds: dict[str, list[float]]) -> None:
    medians = {name: statistics.median(measured) for name, measured in speeds.items()}
    base = next(iter(medians.values()))
    print(f"{title}:", flush=True)
    for name, median in medians.items():
        print(f"  {name:36} {median:7.1f} tokens a second, {median / base:.2f} x", flush=True)


def _plain(model: Path, threads: int) -> ServerProcess:
    port = free_port()
    command = [sys.executable, "-m", "cloud_service", "serve", "--model", str(model), "--port", str(port)]
    command += ["--context-length", str(CONTEXT), "--threads", str(threads)]
    return ServerProcess("cloud", command, port, "/ready")


def _on_ray(model: Path, cores: int, folder: Path) -> ServerProcess:
    port = free_port()
    config = yaml.safe_load(SERVE_CONFIG.read_text(encoding="utf-8"))
    config["http_options"]["port"] = port
    [application] = config["applications"]
    application["args"] |= {"model": str(model), "context_length": CONTEXT}
    application["deployments"][0]["ray_actor_options"]["num_cpus"] = cores
    application["deployments"][0]["autoscaling_config"]["max_replicas"] = 1
    path = folder / "serve.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return ServerProcess("ray", [sys.executable, "-m", "deploy.ray", str(path), "--cores", str(cores)], port, "/ready")


def _request(tokenizer: Tokenizer, number: int, num_tokens: int) -> GenerationRequest:
    """A list to go on counting, so that look-up finds drafts."""
    text = " ".join(f"{count} {THINGS[number % len(THINGS)]}," for count in range(1 + number, 8 + number))
    return GenerationRequest(tuple(tokenizer.encode(text)), num_tokens, GREEDY)


async def _tokens_per_second(
    contender: Contender, tokenizer: Tokenizer, requests: Sequence[GenerationRequest], drafts: bool
) -> float:
    clients = [CloudClient(url, tokenizer.fingerprint, tokenizer.vocab_size) for url in contender.urls]
    try:
        started = time.perf_counter()
        chosen = [clients[i % len(clients)] for i in range(len(requests))]
        await asyncio.gather(*(_answer(*one, drafts) for one in zip(chosen, requests, strict=True)))
        return sum(request.max_tokens for request in requests) / (time.perf_counter() - started)
    finally:
        for client in clients:
            await client.close()


async def _answer(client: CloudClient, request: GenerationRequest, drafts: bool) -> None:
    verifier = CloudVerifier(client, request) if drafts else CloudGenerator(client, request)
    drafter, sampler, tokens = NgramDrafter(), Sampler(GREEDY), list(request.prompt)
    end = len(tokens) + request.max_tokens
    while len(tokens) < end:
        gamma = min(GAMMA, end - len(tokens) - 1) if drafts else 0
        draft = await drafter.propose(tokens, gamma, sampler) if gamma else Draft()
        tokens += (await verifier.verify(tokens, draft, sampler)).tokens(draft)
    await verifier.release(tokens)


if __name__ == "__main__":
    main()
