"""What a draft head costs: time of a draft token over that of a direct one, and memory.

    python -m benchmarks.head_cost --target DIRECTORY --head DIRECTORY [--rounds 60]

A round is a direct pass of the target, then drafts of one and of four tokens, all through the inference thread as a
session makes them, from 300 tokens on. Medians, in turns, greedy and drawn. Memory: what a process with target and head
holds after that beyond one with the target alone. Nothing else should run on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import time
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from edge_agent.drafters import Drafter, HeadDrafter, NullDrafter
from edge_agent.verifier import LocalVerifier
from shared.acceptance import Draft
from shared.causal_lm import CausalLM
from shared.inference_thread import InferenceThread
from shared.memory import release_freed_memory
from shared.models.head import open_head
from shared.models.target_embedding import TargetEmbedding
from shared.onnx_head import OnnxHead
from shared.onnx_lm import OnnxModel
from shared.sampling import Sampler, SamplingParams

CONTEXT = 2048
LONG = 4
PROMPT = [100 + 37 * index % 1900 for index in range(300)]
MODES = {"greedy": SamplingParams(temperature=0), "drawn": SamplingParams(temperature=0.8, top_p=0.95, seed=1)}

Times = dict[str, list[float]]


def load(target: Path, head: Path | None, thread: InferenceThread) -> tuple[CausalLM, Drafter]:
    """A sequence of the target, and its head's drafter; without a head one that never drafts."""
    model = OnnxModel(target, context_length=CONTEXT)
    if head is None:
        return model.new_cache(), NullDrafter()
    lm = model.new_cache_with_hidden_states()
    weights = OnnxHead(open_head(head, target=target), TargetEmbedding(target), context_length=CONTEXT)
    return lm, HeadDrafter(weights.new_cache(), lm, thread)


async def rounds(lm: CausalLM, drafter: Drafter, thread: InferenceThread, params: SamplingParams, count: int) -> Times:
    """Seconds of each part of each round: `direct`, `one` draft token, `long` for a draft of four."""
    verifier, sampler, tokens = LocalVerifier(lm, thread), Sampler(params, prompt=PROMPT), list(PROMPT)
    times: Times = {"direct": [], "one": [], "long": []}
    for _ in range(count):
        started = time.perf_counter()
        verdict = await verifier.verify(tokens, Draft(), sampler)
        verified = time.perf_counter()
        tokens.append(verdict.next_token)
        sampler.append(verdict.next_token)
        await drafter.propose(tokens, 1, sampler)
        drafted = time.perf_counter()
        await drafter.propose(tokens, LONG, sampler)
        times["direct"].append(verified - started)
        times["one"].append(drafted - verified)
        times["long"].append(time.perf_counter() - drafted)
    return {name: values[2:] for name, values in times.items()}  # the first two read the prompt


def measure(target: Path, head: Path | None, count: int) -> tuple[dict[str, Times], int]:
    """Times by mode, and resident bytes afterwards."""
    thread = InferenceThread()
    try:
        lm, drafter = load(target, head, thread)
        release_freed_memory()
        found = {mode: asyncio.run(rounds(lm, drafter, thread, params, count)) for mode, params in MODES.items()}
        return found, int(psutil.Process().memory_info().rss)
    finally:
        thread.stop()


def table(found: dict[str, Times]) -> Table:
    """Medians in milliseconds, and the share of a direct token of each."""
    shown = Table("", "direct, ms", "first draft token, ms", "/ direct", f"each of {LONG}, ms", "/ direct")
    for mode, times in found.items():
        direct, one, long = (statistics.median(times[name]) for name in ("direct", "one", "long"))
        each = long / LONG
        figures = (f"{direct * 1e3:.2f}", f"{one * 1e3:.2f}", f"{one / direct:.3f}")
        shown.add_row(mode, *figures, f"{each * 1e3:.2f}", f"{each / direct:.3f}")
    return shown


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True, help="a built model's directory")
    parser.add_argument("--head", type=Path, help="its head's directory; without one only the memory is printed")
    parser.add_argument("--rounds", type=int, default=60)
    arguments = parser.parse_args()
    found, resident = measure(arguments.target, arguments.head, arguments.rounds)
    if arguments.head is None:
        print(resident)
        return 0
    command = [sys.executable, "-m", "benchmarks.head_cost", "--target", str(arguments.target)]
    alone = subprocess.run([*command, "--rounds", str(arguments.rounds)], capture_output=True, text=True, check=True)
    console = Console()
    console.print(table(found))
    console.print(f"memory: {(resident - int(alone.stdout)) / 1e6:,.0f} MB more than {int(alone.stdout) / 1e6:,.0f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
