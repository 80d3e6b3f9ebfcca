"""What the policy and the round loop themselves cost.

    python -m benchmarks.policy_cost [--preset tiny] [--tokens 128] [--repeats 5]

Prints microseconds a round of decide, gain, trim and observe, with two look-ups and two costly drafters that are always
asked; and the time of direct decoding through the session over that of a bare loop of passes and draws, on the same
model and the same answer, block by block in turns. Nothing else should run on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence

from edge_agent.config import Preset, load_settings
from edge_agent.controller import RoundState
from edge_agent.cost_model import CostModel
from edge_agent.device import Device
from edge_agent.engine import Engine
from edge_agent.loading import load_engine
from edge_agent.policy_controller import PolicyEngine, Senses
from edge_agent.request import GenerationRequest, Speculation
from edge_agent.round import Origin, Round, TokenEvent
from edge_agent.session import Session
from edge_agent.thresholds import PRESETS
from edge_agent.thresholds import Preset as Limits
from shared.acceptance import Draft
from shared.models.progress import RichProgress
from shared.sampling import Sampler, SamplingParams

CURVE = (0.048, 0.053, 0.065, 0.075, 0.084, 0.094, 0.104, 0.113, 0.123)
PROMPT = "Tell me how a lighthouse works."
BLOCK = 16
"""Tokens that a loop decodes before the other's turn."""


def policy_us(num_rounds: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """Median microseconds a round, over rounds whose drafts stand or fall at random."""
    policy = PolicyEngine(
        CostModel(CURVE, {"head": 0.005, "model": 0.02}),
        PRESETS[Limits.SERVER],
        drafters=("ngram", "pool", "head", "model"),
        catch_up_s={"head": 0.0001, "model": 0.001},
    )
    for name in ("head", "model"):
        policy.prior.asked(name, 0.3)
    rng = random.Random(0)
    request = GenerationRequest((1,) * 100, 10 * num_rounds)
    controller = policy.open(request)
    events = tuple(TokenEvent(index, 7, Origin.TARGET) for index in range(9))
    costs = []
    for number in range(num_rounds):
        state = RoundState(request, number, number, 10_000)
        drafts = [
            Draft((7,) * length, name, confidences=tuple(rng.uniform(0.2, 1.0) for _ in range(length)))
            for name, length in (("ngram", 8), ("pool", 8), ("head", 3), ("model", 2))
        ]
        started = clock()
        decision = controller.decide(state)
        best = max(drafts, key=controller.gain)
        kept = controller.trim(state, best)
        costs.append(clock() - started)
        draft = Draft(best.tokens[:kept], best.drafter, confidences=best.confidences[:kept])
        accepted = rng.randint(0, kept)
        round = Round(number, decision, draft, accepted, 7, events[: accepted + 1], 0.005, CURVE[kept])
        started = clock()
        controller.observe(state, round)
        costs[-1] += clock() - started
    return statistics.median(costs) * 1e6


class BareLoop:
    """Nothing but passes and draws, a block at a time, on the inference thread."""

    def __init__(self, engine: Engine, request: GenerationRequest) -> None:
        self._engine = engine
        self._lm = engine.target.slots.acquire(())
        self._sampler = Sampler(request.sampling, stop_ids=request.stop_ids, prompt=request.prompt)
        self.tokens = list(request.prompt)

    async def block_s(self, num_tokens: int) -> float:
        """Seconds that all but the first of so many tokens take."""
        return await self._engine.thread.run(self._block_s, num_tokens)

    def close(self) -> None:
        """Give the cache back."""
        self._engine.target.slots.release(self._lm)

    def _block_s(self, num_tokens: int) -> float:
        times = []
        for _ in range(num_tokens):
            logits = self._lm.forward(self.tokens[len(self._lm.tokens) :], 1)[0]
            token = self._sampler.draw(logits, len(self.tokens))
            self._sampler.append(token)
            self.tokens.append(token)
            times.append(time.perf_counter())
        return times[-1] - times[0]


class SessionLoop:
    """The same through a session."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._rounds = session.run()

    @property
    def tokens(self) -> Sequence[int]:
        """The prompt and the answer so far."""
        return self._session.tokens

    async def block_s(self, num_tokens: int) -> float:
        """Seconds that all but the first of so many rounds take."""
        times = []
        for _ in range(num_tokens):
            await anext(self._rounds)
            times.append(time.perf_counter())
        return times[-1] - times[0]

    async def close(self) -> None:
        """Leave the answer."""
        await self._rounds.aclose()


async def ratios(engine: Engine, request: GenerationRequest) -> list[float]:
    """Session over bare loop, block by block of the same answer: each from the same length of the same cache, and so
    close in time that the machine's mood is the same."""
    engine.forget_prompts()
    found = []
    async with engine.session(request) as session:
        loops = SessionLoop(session), BareLoop(engine, request)
        through_session, bare = loops
        try:
            for number in range(request.max_tokens // BLOCK):
                seconds = {loop: await loop.block_s(BLOCK) for loop in loops[:: 1 if number % 2 else -1]}
                assert list(through_session.tokens) == bare.tokens, "the two loops decode different answers"
                found.append(seconds[through_session] / seconds[bare])
        finally:
            await through_session.close()
            bare.close()
    return found[1:]  # The first block has read the prompt.


async def loop_overhead(preset: Preset, num_tokens: int, repeats: int) -> list[float]:
    """Time of a block of tokens through the session over that of the bare loop, of every block."""
    with RichProgress() as progress:
        engine = await load_engine(load_settings({"preset": preset}), Device("push"), Senses(), progress)
    try:
        prompt = engine.chat_template.encode(engine.tokenizer, [{"role": "user", "content": PROMPT}])
        request = GenerationRequest(
            tuple(prompt), num_tokens, SamplingParams(temperature=0), speculation=Speculation.OFF
        )
        return [ratio for _ in range(repeats) for ratio in await ratios(engine, request)]
    finally:
        await engine.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", type=Preset, choices=list(Preset), default=Preset.TINY)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    print(f"policy: {policy_us(5000):.1f} microseconds a round")
    overheads = asyncio.run(loop_overhead(arguments.preset, arguments.tokens, arguments.repeats))
    low, median, high = statistics.quantiles(overheads, n=4)
    print(f"session over bare loop: {median:.4f} (half of {len(overheads)} blocks: {low:.4f} to {high:.4f})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
