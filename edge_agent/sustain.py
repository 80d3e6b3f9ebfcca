"""Ten minutes on a device that heats up: the same prompts with the policy and without. A simulation.

The model and its text are real, and so are the times: c(m) as calibrated on this machine. Around them is a
`SimulatedPhone` in a time of its own: every pass takes c(m) over the simulated clock, and heats the device for so long.
What else this machine does meanwhile changes nothing. The cloud is the same target at a speed of its own, behind a
round trip.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import cycle

from edge_agent.controller import FixedController, RoundPolicy
from edge_agent.cost_model import CostCurve, CostModel
from edge_agent.decision import Mode
from edge_agent.device_state import Network
from edge_agent.drafters import ChainDrafter, NgramDrafter
from edge_agent.energy import radio_j
from edge_agent.engine import LocalModel
from edge_agent.link_state import NO_LINK, LinkState
from edge_agent.policy_controller import PolicyEngine, Senses
from edge_agent.request import GenerationRequest
from edge_agent.round import Origin, Round
from edge_agent.sensors import DeviceSampler, SimulatedSensors
from edge_agent.session import Session
from edge_agent.simulated_phone import DeviceProfile, SimulatedMeter, SimulatedPhone
from edge_agent.thresholds import Thresholds
from edge_agent.verifier import LocalVerifier, Verifier
from shared.acceptance import Draft, Verdict
from shared.causal_lm import CausalLM, Logits
from shared.inference_thread import InferenceThread
from shared.sampling import Sampler, SamplingParams

UNMANAGED_GAMMA = 4
"""What the run without a policy drafts every round, whatever comes of it."""

ROUND_BYTES = 600
"""Of a round's request and reply with their headers, for the radio's energy."""

LAST_SHARE = 0.3
"""The last part of a run that is compared with its first minute."""


class Setup(StrEnum):
    """What is compared."""

    UNMANAGED = "no policy"
    DEVICE = "policy, no cloud"
    CLOUD = "policy and cloud"


@dataclass(frozen=True)
class SustainPlan:
    """What is run. prompts: token ids. minutes: of the device's time. rtt_s, cloud_speed: of the simulated cloud, its
    passes that many times as fast as the device's at full clock."""

    profile: DeviceProfile
    thresholds: Thresholds
    prompts: Sequence[tuple[int, ...]]
    curve: Sequence[float]
    stop_ids: frozenset[int] = frozenset()
    minutes: float = 10.0
    time_scale: float = 10.0
    max_tokens: int = 48
    rtt_s: float = 0.040
    cloud_speed: float = 1.0


@dataclass(frozen=True)
class Moment:
    """After a round. at_s: of the device's time. joules: of the whole device since the start; radio_j: the radio's."""

    at_s: float
    tokens: int
    joules: float
    radio_j: float
    temperature_c: float
    clock_share: float
    mode: Mode


@dataclass
class SustainRun:
    """One setup's course."""

    setup: Setup
    time_scale: float
    seconds: float
    moments: list[Moment] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """All tokens of the run."""
        return self.moments[-1].tokens if self.moments else 0

    @property
    def joules_per_token(self) -> float:
        """Joules of the whole device over tokens, wherever they were made."""
        return self.moments[-1].joules / max(self.num_tokens, 1) if self.moments else 0.0

    @property
    def radio_share(self) -> float:
        """Share of the joules that the radio took."""
        return self.moments[-1].radio_j / self.moments[-1].joules if self.moments else 0.0

    def rate(self, start_s: float, end_s: float) -> float:
        """Tokens a second of real time, between two moments of the device's time."""
        tokens = self._tokens_at(end_s) - self._tokens_at(start_s)
        return tokens / max((end_s - start_s) / self.time_scale, 1e-9)

    @property
    def first_minute(self) -> float:
        """Tokens a second in the first minute."""
        return self.rate(0.0, min(60.0, self.seconds))

    @property
    def last_part(self) -> float:
        """Tokens a second in the last part of the run."""
        return self.rate(self.seconds * (1 - LAST_SHARE), self.seconds)

    @property
    def retained(self) -> float:
        """The last part's rate as a share of the first minute's."""
        return self.last_part / self.first_minute if self.first_minute else 0.0

    @property
    def cloud_share(self) -> float:
        """Share of the rounds that the cloud served."""
        return sum(not moment.mode.on_device for moment in self.moments) / max(len(self.moments), 1)

    def temperature_at(self, at_s: float) -> float:
        """°C at this moment of the device's time."""
        before = [moment for moment in self.moments if moment.at_s <= at_s]
        return (before or self.moments)[-1].temperature_c

    def _tokens_at(self, at_s: float) -> int:
        tokens = 0
        for moment in self.moments:
            if moment.at_s > at_s:
                break
            tokens = moment.tokens
        return tokens


class DeviceTime:
    """Seconds that pass when something takes them."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        """Since the start."""
        return self._now

    def take(self, seconds: float) -> None:
        """So long, until now."""
        self._now += max(seconds, 0.0)


class TimedLM:
    """A language model whose passes take what they were measured to take, slowed down by a device's clock or not."""

    def __init__(self, lm: CausalLM, curve: CostCurve, time: DeviceTime, phone: SimulatedPhone | None) -> None:
        self._lm = lm
        self._curve = curve
        self._time = time
        self._phone = phone

    @property
    def vocab_size(self) -> int:
        """Width of a row of logits."""
        return self._lm.vocab_size

    @property
    def context_length(self) -> int:
        """Most tokens that the cache can hold."""
        return self._lm.context_length

    @property
    def tokens(self) -> Sequence[int]:
        """The tokens in the cache."""
        return self._lm.tokens

    def forward(self, tokens: Sequence[int], num_logits: int) -> Logits:
        """A real pass, charged at its measured time."""
        logits = self._lm.forward(tokens, num_logits)
        seconds = self._curve.at(len(tokens))
        if self._phone is None:
            self._time.take(seconds)
        else:
            self._time.take(seconds / self._phone.clock_share)
            self._phone.work(seconds / self._phone.clock_share)
        return logits

    def truncate(self, length: int) -> None:
        """Forget the tokens after the first `length`."""
        self._lm.truncate(length)


class CloudOfOwn:
    """A stand-in for the cloud verifier: the same target at a speed of its own, behind a round trip."""

    origin = Origin.CLOUD

    def __init__(self, verifier: Verifier, time: DeviceTime, phone: SimulatedPhone, rtt_s: float) -> None:
        self._verifier = verifier
        self._time = time
        self._phone = phone
        self._rtt_s = rtt_s
        self._streaming = False

    async def verify(self, tokens: Sequence[int], draft: Draft, sampler: Sampler, *, goes_on: bool = False) -> Verdict:
        """A round trip for a draft, and for the beginning of a stream; the stream's next tokens come one by one."""
        started = self._time.now()
        if draft.tokens or not self._streaming:
            self._time.take(self._rtt_s)
        self._streaming = not draft.tokens
        verdict = await self._verifier.verify(tokens, draft, sampler)
        active_s = self._time.now() - started
        self._phone.transmit(radio_j(Network.WIFI, ROUND_BYTES, ROUND_BYTES, active_s))
        return verdict

    async def release(self, tokens: Sequence[int]) -> None:
        """The stream ends."""
        self._streaming = False
        await self._verifier.release(tokens)


async def run_setup(target: LocalModel, plan: SustainPlan, setup: Setup) -> SustainRun:
    """One setup from a cool start to the end of its time."""
    bench = _Bench(target, plan, setup)
    run = SustainRun(setup, plan.time_scale, plan.minutes * 60.0)
    thread = InferenceThread()
    try:
        async for moment in bench.moments(thread):
            run.moments.append(moment)
    finally:
        thread.stop()
    return run


class _Bench:
    """A simulated device with the policy of a setup."""

    def __init__(self, target: LocalModel, plan: SustainPlan, setup: Setup) -> None:
        self._target = target
        self._plan = plan
        self._setup = setup
        self._curve = CostCurve(tuple(plan.curve))
        self._cloud_curve = CostCurve(tuple(seconds / plan.cloud_speed for seconds in plan.curve))
        self._time = DeviceTime()
        self._phone = SimulatedPhone(plan.profile, time_scale=plan.time_scale, clock=self._time.now)
        self._sampler = DeviceSampler(SimulatedSensors(self._phone), clock=self._now)
        self._sampled_at = -1.0
        self._tokens = 0

    async def moments(self, thread: InferenceThread) -> AsyncIterator[Moment]:
        """A moment a round, until the time is over."""
        policy = self._policy()
        for prompt in cycle(self._plan.prompts):
            async with self._session(prompt, policy, thread) as session:
                async for round in session.run():
                    yield self._moment(round)
                    if self._now() >= self._plan.minutes * 60.0:
                        return

    def _now(self) -> float:
        """The policy's clock runs as fast as the device's heat, so that its dwell and forecast mean what they say."""
        return self._time.now() * self._plan.time_scale

    def _policy(self) -> RoundPolicy | None:
        if self._setup is Setup.UNMANAGED:
            return None
        link = NO_LINK
        if self._setup is Setup.CLOUD:
            link = LinkState(True, True, self._plan.rtt_s, self._cloud_curve.values)
        return PolicyEngine(
            CostModel(self._plan.curve),
            self._plan.thresholds,
            drafters=("ngram",),
            senses=Senses(device=self._sampler.state, link=lambda: link),
            meter=SimulatedMeter(self._phone),
            clock=self._now,
        )

    @asynccontextmanager
    async def _session(
        self, prompt: tuple[int, ...], policy: RoundPolicy | None, thread: InferenceThread
    ) -> AsyncIterator[Session]:
        plan = self._plan
        request = GenerationRequest(prompt, plan.max_tokens, SamplingParams(temperature=0.0), stop_ids=plan.stop_ids)
        controller = policy.open(request) if policy else FixedController(UNMANAGED_GAMMA)
        # Every answer reads its prompt, in the first minute as in the last.
        self._target.slots.forget()
        async with self._target.slot(prompt) as here, self._target.slot(prompt) as there:
            local: Verifier = LocalVerifier(TimedLM(here, self._curve, self._time, self._phone), thread)
            cloud = LocalVerifier(TimedLM(there, self._cloud_curve, self._time, None), thread)
            remote: Verifier = CloudOfOwn(cloud, self._time, self._phone, plan.rtt_s)
            yield Session(
                request,
                controller,
                ChainDrafter([NgramDrafter()], controller),
                {
                    Mode.LOCAL_DIRECT: local,
                    Mode.LOCAL_SPECULATIVE: local,
                    Mode.CLOUD_VERIFY: remote,
                    Mode.CLOUD_GENERATE: remote,
                },
                self._target.context_length,
                clock=self._time.now,
            )

    def _moment(self, round: Round) -> Moment:
        pace = round.decision.pace_s * len(round.tokens)
        self._time.take(pace - round.draft_s - round.verify_s)
        now = self._now()
        if now - self._sampled_at >= 1.0:
            self._sampler.sample()
            self._sampled_at = now
        self._tokens += len(round.tokens)
        phone, mode = self._phone, round.decision.mode
        return Moment(now, self._tokens, phone.total_j(), phone.radio_j, phone.temperature_c, phone.clock_share, mode)


async def run_all(target: LocalModel, plan: SustainPlan, setups: Sequence[Setup] = tuple(Setup)) -> list[SustainRun]:
    """The setups one after the other."""
    return [await run_setup(target, plan, setup) for setup in setups]
