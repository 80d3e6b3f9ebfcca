"""Ways of answering that are compared: direct, each drafter alone at a fixed gamma, the policy, and a peer."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

from edge_agent.bench.answer_timing import AnswerTiming
from edge_agent.controller import FixedController
from edge_agent.decision import Mode
from edge_agent.drafters import Drafter, HeadDrafter, ModelDrafter, NgramDrafter, NullDrafter, PredictionDrafter
from edge_agent.energy import EnergyMeter
from edge_agent.engine import Engine
from edge_agent.request import Execution, GenerationRequest
from edge_agent.round import Round
from edge_agent.scenarios import Scenario
from edge_agent.session import Session
from edge_agent.verifier import LocalVerifier
from shared.draft_head import HiddenStates
from shared.sampling import SamplingParams

DIRECT = "direct"
AUTO = "auto"


class Contender(Protocol):
    """One way of answering."""

    @property
    def name(self) -> str:
        """Its name in tables."""

    def takes(self, scenario: Scenario) -> bool:
        """Whether it has anything to say to a scenario."""

    async def answer(self, scenario: Scenario, max_tokens: int) -> AnswerTiming:
        """Answer greedily, from an empty cache, and tell what it took."""


@dataclass
class Progress:
    """What a local answer has shown so far."""

    started: float
    tokens: list[int] = field(default_factory=list)
    first_token_s: float = 0.0
    num_first_tokens: int = 0
    draft_s: float = 0.0
    num_rounds: int = 0
    num_drafted: int = 0
    judged: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def add(self, round: Round, now: float) -> None:
        """One more round."""
        if not self.tokens and round.tokens:
            self.first_token_s = now - self.started
            self.num_first_tokens = len(round.tokens)
        self.tokens += [event.token for event in round.tokens]
        self.draft_s += round.draft_s
        self.num_rounds += 1
        self.num_drafted += len(round.draft)
        for position in range(min(round.accepted + 1, len(round.draft))):
            if position == len(self.judged):
                self.judged.append(0)
                self.accepted.append(0)
            self.judged[position] += 1
            self.accepted[position] += position < round.accepted


class LocalContender:
    """Answers with the engine's models, in this process."""

    def __init__(
        self,
        name: str,
        engine: Engine,
        meter: EnergyMeter,
        gamma: int | None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """name: `direct`, a drafter's name, or `auto` for the policy with all drafters (gamma None)."""
        self.name = name
        self._engine = engine
        self._meter = meter
        self._gamma = gamma
        self._clock = clock

    def takes(self, scenario: Scenario) -> bool:
        """All but the prediction drafter answer everything."""
        return self.name != PredictionDrafter.name or scenario.prediction is not None

    async def answer(self, scenario: Scenario, max_tokens: int) -> AnswerTiming:
        """See `Contender.answer`. CPU time and energy are this process's: it does nothing else meanwhile."""
        request = self._request(scenario, max_tokens)
        self._engine.forget_prompts()
        cpu, joules = time.process_time(), self._meter.total_j()
        progress = Progress(self._clock())
        async with self._session(request) as session:
            async for round in session.run():
                progress.add(round, self._clock())
        total_s = self._clock() - progress.started
        return AnswerTiming(
            text=self._engine.tokenizer.decode(progress.tokens),
            num_tokens=len(progress.tokens),
            total_s=total_s,
            first_token_s=progress.first_token_s or total_s,
            num_first_tokens=progress.num_first_tokens,
            draft_s=progress.draft_s,
            num_rounds=progress.num_rounds,
            num_drafted=progress.num_drafted,
            num_judged=tuple(progress.judged),
            num_accepted=tuple(progress.accepted),
            cpu_s=time.process_time() - cpu,
            joules=self._meter.total_j() - joules,
        )

    def _request(self, scenario: Scenario, max_tokens: int) -> GenerationRequest:
        engine = self._engine
        prompt = engine.chat_template.encode(engine.tokenizer, [{"role": "user", "content": scenario.text}])
        return GenerationRequest(
            prompt=tuple(prompt),
            max_tokens=min(max_tokens, engine.context_length - len(prompt)),
            sampling=SamplingParams(temperature=0.0),
            stop_ids=engine.tokenizer.eos_ids,
            prediction=tuple(engine.tokenizer.encode(scenario.prediction)) if scenario.prediction else (),
            execution=Execution.ONLY_DEVICE,
        )

    @asynccontextmanager
    async def _session(self, request: GenerationRequest) -> AsyncIterator[Session]:
        engine = self._engine
        if self._gamma is None:
            async with engine.session(request) as session:
                yield session
            return
        async with AsyncExitStack() as stack:
            lm = await stack.enter_async_context(engine.target.slot(request.prompt))
            drafter: Drafter = NullDrafter()
            if self.name == ModelDrafter.name and engine.draft is not None:
                draft_lm = await stack.enter_async_context(engine.draft.slot(request.prompt))
                drafter = ModelDrafter(draft_lm, engine.thread)
            elif self.name == HeadDrafter.name and engine.heads is not None and isinstance(lm, HiddenStates):
                drafter = HeadDrafter(stack.enter_context(engine.heads.slot(request.prompt)), lm, engine.thread)
            elif self.name == NgramDrafter.name:
                drafter = NgramDrafter()
            elif self.name == PredictionDrafter.name:
                drafter = PredictionDrafter(request.prediction, len(request.prompt))
            verifiers = dict.fromkeys((Mode.LOCAL_DIRECT, Mode.LOCAL_SPECULATIVE), LocalVerifier(lm, engine.thread))
            yield Session(request, FixedController(self._gamma), drafter, verifiers, engine.context_length)


def local_contenders(engine: Engine, meter: EnergyMeter, gamma: int, *, predictions: bool) -> list[LocalContender]:
    """Direct, every drafter that the engine has at `gamma`, and the policy. predictions: whether a scenario has one."""
    fixed = [NgramDrafter.name]
    if predictions:
        fixed.append(PredictionDrafter.name)
    if engine.heads is not None:
        fixed.append(HeadDrafter.name)
    if engine.draft is not None:
        fixed.append(ModelDrafter.name)
    return [
        LocalContender(DIRECT, engine, meter, 0),
        *(LocalContender(name, engine, meter, gamma) for name in fixed),
        LocalContender(AUTO, engine, meter, None),
    ]
