"""Edge agents with a real model: the cloud verifies drafts or goes on by itself, the device helps when it fails."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from edge_agent.cloud_client import CloudClient, CloudTimeouts
from edge_agent.cloud_verifier import CloudGenerator, CloudVerifier
from edge_agent.decision import Mode
from edge_agent.drafters import NgramDrafter
from edge_agent.request import GenerationRequest
from edge_agent.round import Round
from edge_agent.session import Session
from edge_agent.verifier import LocalVerifier
from shared.inference_thread import InferenceThread
from shared.onnx_lm import OnnxModel
from shared.sampling import SamplingParams
from shared.tokenizer import Tokenizer
from tests.cloud_edge import PlannedController, always, tokens_of
from tests.test_cloud_models import assert_the_models_own

CONTEXT = 256
NUM_SESSIONS = 16
NUM_VERIFIED = NUM_SESSIONS // 2
"""Every second one; the others are streams."""
NUM_TOKENS = 32
THINGS = "rain bread sea bridge winter train salt moon river stone apple house light paper green music"
PATIENT = CloudTimeouts(connect_s=10, read_s=120)


@dataclass(frozen=True)
class Answer:
    """failures: rounds that the cloud failed and the device made."""

    request: GenerationRequest
    rounds: Sequence[Round]
    failures: int

    @property
    def tokens(self) -> list[int]:
        return tokens_of(self.rounds)


class RealEdges:
    """Devices that share one model to save memory, and nothing else: each has connections of its own."""

    def __init__(self, directory: Path, thread: InferenceThread) -> None:
        self.model = OnnxModel(directory, context_length=CONTEXT, num_threads=1)
        self._tokenizer = Tokenizer.from_directory(directory)
        self._thread = thread

    def requests(self, num: int = NUM_SESSIONS) -> list[GenerationRequest]:
        """Different prompts, without a stop: every answer has NUM_TOKENS tokens."""
        return [self._request(number) for number in range(num)]

    async def answer(
        self,
        url: str,
        request: GenerationRequest,
        mode: Mode,
        after_round: Callable[[Round], None] = lambda round: None,
    ) -> Answer:
        client = CloudClient(url, self._tokenizer.fingerprint, self._tokenizer.vocab_size, timeouts=PATIENT)
        controller = PlannedController(always(mode), gamma=3)
        local = LocalVerifier(self.model.new_cache(), self._thread)
        verifiers = {
            Mode.LOCAL_DIRECT: local,
            Mode.CLOUD_VERIFY: CloudVerifier(client, request),
            Mode.CLOUD_GENERATE: CloudGenerator(client, request),
        }
        rounds = []
        try:
            async for round in Session(request, controller, NgramDrafter(), verifiers, CONTEXT).run():
                rounds.append(round)
                after_round(round)
        finally:
            await client.close()
        return Answer(request, rounds, controller.failures)

    async def answers(
        self, url: str, requests: Sequence[GenerationRequest], after_round: Callable[[Round], None] = lambda round: None
    ) -> list[Answer]:
        """All at once."""
        one_each = (self.answer(url, request, mode_of(number), after_round) for number, request in enumerate(requests))
        return await asyncio.gather(*one_each)

    def assert_same(self, answers: Sequence[Answer], undisturbed: Sequence[Answer]) -> None:
        """Token for token; where the model is of two minds in its last bits, either is its own answer."""
        for answer, reference in zip(answers, undisturbed, strict=True):
            assert len(answer.tokens) == NUM_TOKENS
            if answer.tokens != reference.tokens:
                assert_the_models_own(self.model, answer.request.prompt, answer.tokens)

    def _request(self, number: int) -> GenerationRequest:
        """A list to go on counting: the model is sure of each token, and none stands for another."""
        things = THINGS.split()
        text = " ".join(f"{count} {things[number]}," for count in range(1, 8))
        return GenerationRequest(tuple(self._tokenizer.encode(text)), NUM_TOKENS, SamplingParams(temperature=0))


@contextmanager
def real_edges(directory: Path) -> Iterator[RealEdges]:
    thread = InferenceThread()
    try:
        yield RealEdges(directory, thread)
    finally:
        thread.stop()


def mode_of(number: int) -> Mode:
    """How the cloud serves the session of this number."""
    return Mode.CLOUD_GENERATE if number % 2 else Mode.CLOUD_VERIFY


def when_rounds(number: int, act: Callable[[], None]) -> Callable[[Round], None]:
    """Acts once, after so many rounds of all sessions together."""
    done: list[Round] = []

    def after_round(round: Round) -> None:
        done.append(round)
        if len(done) == number:
            act()

    return after_round


def counted(*urls: str, key: str | None = None) -> dict[tuple[str, str], float]:
    """What the services have counted, all together: (metric, value of its own label or "") -> sum."""
    sums: dict[tuple[str, str], float] = {}
    for url in urls:
        for family in text_string_to_metric_families(httpx.get(f"{url}/metrics", timeout=60).text):
            for sample in family.samples:
                label = next((value for name, value in sample.labels.items() if name != "instance"), "")
                sums[sample.name, label] = sums.get((sample.name, label), 0.0) + sample.value
    return sums


def affinity(before: dict[tuple[str, str], float], after: dict[tuple[str, str], float]) -> float:
    """Share of the verified rounds, each session's first apart, that found their session where they went."""

    def change(name: str, label: str) -> float:
        return after.get((name, label), 0.0) - before.get((name, label), 0.0)

    missed = sum(change("souschef_cloud_session_rebuilds_total", cause) for cause in ("lost", "moved", "diverged"))
    later = change("souschef_cloud_verify_requests_total", "ok") + missed - NUM_VERIFIED
    return 1 - missed / later
