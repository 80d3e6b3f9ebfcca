"""What the policy and the round loop themselves cost.

    python -m benchmarks.policy_cost [--preset tiny] [--tokens 128] [--repeats 5]

Prints microseconds a round of decide, gain, trim and observe, with two look-ups and two costly drafters that are always
asked; and the time of direct decoding through the session over that of a bare loop of passes and draws on the same
model, in turns. Nothing else should run on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections.abc import Callable

from edge_agent.config import Preset, load_settings
from edge_agent.controller import RoundState
from edge_agent.cost_model import CostModel
from edge_agent.device import Device
from edge_agent.engine import Engine
from edge_agent.loading import load_engine
from edge_agent.policy_controller import PolicyEngine, Senses
from edge_agent.request import GenerationRequest, Speculation
from edge_agent.round import Origin, Round, TokenEvent
from edge_agent.thresholds import PRESETS
from edge_agent.thresholds import Preset as Limits
from shared.acceptance import Draft
from shared.models.progress import RichProgress
from shared.sampling import Sampler, SamplingParams, draw

CURVE = (0.048, 0.053, 0.065, 0.075, 0.084, 0.094, 0.104, 0.113, 0.123)
PROMPT = "Tell me how a lighthouse works."


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


async def session_s(engine: Engine, request: GenerationRequest) -> float:
    """Seconds a token after the first, through the session with speculation off."""
    engine.forget_prompts()
    times = []
    async with engine.session(request) as session:
        async for _ in session.run():
            times.append(time.perf_counter())
    return (times[-1] - times[0]) / (len(times) - 1)


async def bare_s(engine: Engine, request: GenerationRequest) -> float:
    """The same by nothing but passes and draws, on the inference thread."""

    def loop() -> float:
        lm = engine.target.slots.acquire(())
        sampler = Sampler(request.sampling, stop_ids=request.stop_ids, prompt=request.prompt)
        times = []
        try:
            feed = list(request.prompt)
            for position in range(len(feed), len(feed) + request.max_tokens):
                token = draw(sampler.distribution(lm.forward(feed, 1)[0]), request.sampling.seed, position)
                sampler.append(token)
                times.append(time.perf_counter())
                feed = [token]
        finally:
            engine.target.slots.release(lm)
        return (times[-1] - times[0]) / (len(times) - 1)

    engine.forget_prompts()
    return await engine.thread.run(loop)


async def loop_overhead(preset: Preset, num_tokens: int, repeats: int) -> float:
    """Time a token of the session over that of the bare loop: the median of the repeats' ratios."""
    with RichProgress() as progress:
        engine = await load_engine(load_settings({"preset": preset}), Device("push"), Senses(), progress)
    try:
        prompt = engine.chat_template.encode(engine.tokenizer, [{"role": "user", "content": PROMPT}])
        request = GenerationRequest(
            tuple(prompt), num_tokens, SamplingParams(temperature=0), speculation=Speculation.OFF
        )
        await bare_s(engine, request)
        ratios = []
        for number in range(repeats):
            ways = [session_s, bare_s][:: 1 if number % 2 else -1]
            seconds = {way: await way(engine, request) for way in ways}
            ratios.append(seconds[session_s] / seconds[bare_s])
        return statistics.median(ratios)
    finally:
        await engine.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", type=Preset, choices=list(Preset), default=Preset.TINY)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    print(f"policy: {policy_us(5000):.1f} microseconds a round")
    overhead = asyncio.run(loop_overhead(arguments.preset, arguments.tokens, arguments.repeats))
    print(f"session over bare loop: {overhead:.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
