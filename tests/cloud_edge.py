"""An edge without a device behind it: sessions whose rounds are scripted, verified by a cloud or a local toy."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from edge_agent.cloud_client import CloudClient, CloudTimeouts
from edge_agent.cloud_verifier import CloudGenerator, CloudVerifier
from edge_agent.controller import FixedController, RoundState
from edge_agent.decision import Decision, Mode, Reason
from edge_agent.draft_ahead import DraftAhead
from edge_agent.drafters import Drafter, ModelDrafter, NullDrafter
from edge_agent.request import GenerationRequest
from edge_agent.round import Round
from edge_agent.session import Session
from edge_agent.verifier import LocalVerifier
from shared.inference_thread import InferenceThread
from shared.sampling import Sampler
from tests.cloud_toy import FINGERPRINT, SEED, VOCAB
from tests.fakes import TableLM

PROMPT = (1, 2, 3, 1, 2)

Plan = Callable[[RoundState], Mode]


class PlannedController(FixedController):
    """Each round's mode by a plan; the device when the cloud fails, if it may."""

    def __init__(self, plan: Plan, gamma: int = 3, fallback: bool = True) -> None:
        super().__init__(gamma)
        self._plan = plan
        self._most = gamma
        self._fallback = fallback
        self.failures = 0

    def decide(self, state: RoundState) -> Decision:
        mode = self._plan(state)
        drafts = mode in (Mode.CLOUD_VERIFY, Mode.LOCAL_SPECULATIVE)
        return Decision(mode, self._most if drafts else 0, Reason.REQUESTED)

    def cloud_failed(self, state: RoundState) -> Decision:
        self.failures += 1
        if not self._fallback:
            raise
        return Decision(Mode.LOCAL_DIRECT, 0, Reason.CLOUD_UNAVAILABLE)


def always(mode: Mode) -> Plan:
    return lambda state: mode


def expected(request: GenerationRequest) -> list[int]:
    """Plain decoding with the cloud's toy."""
    lm = TableLM(VOCAB, SEED)
    sampler = Sampler(request.sampling, stop_ids=request.stop_ids, prompt=request.prompt)
    sequence = list(request.prompt)
    while len(sequence) < len(request.prompt) + request.max_tokens:
        token = sampler.draw(lm.logits_after(sequence), len(sequence))
        if token in request.stop_ids:
            break
        sampler.append(token)
        sequence.append(token)
    return sequence[len(request.prompt) :]


@asynccontextmanager
async def cloud_client(url: str, **options: object) -> AsyncIterator[CloudClient]:
    settings = {"timeouts": CloudTimeouts(connect_s=20.0, read_s=60.0, forget_s=20.0), **options}
    client = CloudClient(url, FINGERPRINT, VOCAB, **settings)  # type: ignore[arg-type]
    try:
        yield client
    finally:
        await client.close()


@asynccontextmanager
async def edge_session(
    client: CloudClient, request: GenerationRequest, controller: FixedController, *, draft_blend: float | None = 0.3
) -> AsyncIterator[Session]:
    """draft_blend: how far the drafting toy is from the cloud's; None for no drafts."""
    thread = InferenceThread()
    try:
        target = TableLM(VOCAB, SEED)
        drafter: Drafter = NullDrafter()
        ahead = None
        if draft_blend is not None:
            drafter = ahead = DraftAhead(ModelDrafter(TableLM(VOCAB, 99, tied_to=target, blend=draft_blend), thread))
        local = LocalVerifier(target, thread, request.num_top_logprobs)
        verifiers = {
            Mode.LOCAL_DIRECT: local,
            Mode.LOCAL_SPECULATIVE: local,
            Mode.CLOUD_VERIFY: CloudVerifier(client, request, ahead),
            Mode.CLOUD_GENERATE: CloudGenerator(client, request, "requested"),
        }
        yield Session(request, controller, drafter, verifiers, 4096)
    finally:
        thread.stop()


async def rounds_of(
    client: CloudClient,
    request: GenerationRequest,
    controller: FixedController,
    *,
    draft_blend: float | None = 0.3,
    after_round: Callable[[Round], None] = lambda round: None,
) -> list[Round]:
    rounds = []
    async with edge_session(client, request, controller, draft_blend=draft_blend) as session:
        async for round in session.run():
            rounds.append(round)
            after_round(round)
    return rounds


def tokens_of(rounds: Sequence[Round]) -> list[int]:
    return [event.token for round in rounds for event in round.tokens]


def positions_of(rounds: Sequence[Round]) -> list[int]:
    return [event.position for round in rounds for event in round.tokens]
