"""Is speculation lossless on a real model? Greedy answers with and without drafts, compared by the gap rule.

    python -m benchmarks.losslessness --model DIRECTORY --prompts prompts.jsonl [--tokens 64] [--gamma 4]

One row and m rows go through different INT4 kernels on a CPU, so their logits differ a little. A difference in text is
allowed only where the target's own top-1/top-2 gap is within twice that measured difference; a larger gap is a bug.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from edge_agent.controller import FixedController
from edge_agent.decision import Mode
from edge_agent.drafters import Drafter, NgramDrafter, NullDrafter
from edge_agent.request import GenerationRequest
from edge_agent.session import Session
from edge_agent.verifier import LocalVerifier
from shared.acceptance import Draft, common_prefix_length
from shared.chat_template import ChatTemplate
from shared.inference_thread import InferenceThread
from shared.onnx_lm import OnnxCausalLM, OnnxModel
from shared.sampling import Sampler, SamplingParams
from shared.tokenizer import Tokenizer


class MixedDrafter:
    """An n-gram draft padded with a constant, so that every round verifies gamma tokens and most are rejected."""

    name = "mixed"

    def __init__(self) -> None:
        self._ngram = NgramDrafter()

    async def propose(self, tokens: Sequence[int], gamma: int, sampler: Sampler) -> Draft:
        draft = await self._ngram.propose(tokens, gamma, sampler)
        return Draft((draft.tokens + (tokens[-1],) * gamma)[:gamma], self.name)

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class Comparison:
    """One prompt's two answers. gap: the target's top-1/top-2 gap where they part, None where they don't."""

    prompt: int
    category: str
    length: int
    equal_tokens: int
    gap: float | None


def read_prompts(path: Path) -> Iterator[tuple[int, str, str]]:
    """(id, category, first turn) of each line of a Spec-Bench file."""
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        yield row["id"], row["category"], row["turns"][0]


async def answer(lm: OnnxCausalLM, request: GenerationRequest, gamma: int, drafter: Drafter) -> list[int]:
    """The greedy answer's ids."""
    thread = InferenceThread()
    try:
        verifier = LocalVerifier(lm, thread)
        verifiers = dict.fromkeys((Mode.LOCAL_DIRECT, Mode.LOCAL_SPECULATIVE), verifier)
        session = Session(request, FixedController(gamma), drafter, verifiers, lm.context_length)
        return [event.token async for round in session.run() for event in round.tokens]
    finally:
        thread.stop()


def row_noise(lm: OnnxCausalLM, tokens: Sequence[int], rows: int, start: int) -> float:
    """Largest |difference| of a logit between passes over one position and over `rows`, on the same text."""
    worst = 0.0
    for at in range(start, len(tokens) - rows, rows):
        lm.truncate(min(len(lm.tokens), at))
        if len(lm.tokens) < at:
            lm.forward(tokens[len(lm.tokens) : at], 0)
        together = lm.forward(tokens[at : at + rows], rows).copy()
        lm.truncate(at)
        for row in together:
            alone = lm.forward(tokens[len(lm.tokens) : len(lm.tokens) + 1], 1)[0]
            worst = max(worst, float(np.abs(row - alone).max()))
    return worst


def compare(
    lm: OnnxCausalLM,
    prompt: Sequence[int],
    num_tokens: int,
    gamma: int,
    stop: frozenset[int],
    drafter: Drafter | None = None,
) -> tuple[list[int], int, float | None]:
    """(direct answer, tokens it shares with the speculative one, gap where they part). By default a `MixedDrafter`."""
    request = GenerationRequest(tuple(prompt), num_tokens, SamplingParams(temperature=0), stop)
    direct = asyncio.run(answer(lm, request, 0, NullDrafter()))
    speculative = asyncio.run(answer(lm, request, gamma, drafter or MixedDrafter()))
    equal = common_prefix_length(direct, speculative)
    if equal == len(direct) == len(speculative):
        return direct, equal, None
    sequence = [*prompt, *direct[:equal]]
    lm.truncate(0)
    logits = np.sort(lm.forward(sequence, 1)[0])
    return direct, equal, float(logits[-1] - logits[-2])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a model directory")
    parser.add_argument("--prompts", type=Path, required=True, help="a Spec-Bench file: lines of id, category, turns")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--gamma", type=int, default=4)
    parser.add_argument("--limit", type=int, default=None, help="only the first N prompts")
    arguments = parser.parse_args()
    lm = OnnxModel(arguments.model, context_length=4096).new_cache()
    tokenizer = Tokenizer.from_directory(arguments.model)
    template = ChatTemplate(tokenizer.chat_template, tokenizer.bos_token, None)
    comparisons, noise = [], 0.0
    for number, category, text in list(read_prompts(arguments.prompts))[: arguments.limit]:
        prompt = template.encode(tokenizer, [{"role": "user", "content": text}])[-3000:]
        direct, equal, gap = compare(lm, prompt, arguments.tokens, arguments.gamma, tokenizer.eos_ids)
        comparisons.append(Comparison(number, category, len(direct), equal, gap))
        if len(direct) > arguments.gamma + 1 and len(comparisons) % 5 == 1:
            noise = max(noise, row_noise(lm, [*prompt, *direct], arguments.gamma + 1, len(prompt)))
    parted = [c for c in comparisons if c.gap is not None]
    broken = [c for c in parted if c.gap is not None and c.gap > 2 * noise]
    table = Table("prompt", "category", "tokens", "equal", "gap", "allowed")
    for c in parted:
        table.add_row(
            str(c.prompt), c.category, str(c.length), str(c.equal_tokens), f"{c.gap:.4f}", str(c not in broken)
        )
    console = Console()
    console.print(table)
    console.print(
        f"{len(comparisons)} prompts, {len(comparisons) - len(parted)} with equal texts, "
        f"{len(parted) - len(broken)} parted by a near-tie, {len(broken)} by a bug; row noise {noise:.4f}"
    )
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
