"""Killed, restarted, frozen in mid-answer: a real model behind a real agent, both in processes of their own."""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from shared.onnx_lm import OnnxModel
from shared.tokenizer import Tokenizer
from tests.cloud_toy import CloudProcess
from tests.processes import serving
from tests.servers import events
from tests.tcp_proxy import TokenGate
from tests.test_cloud_models import assert_the_models_own

pytestmark = [pytest.mark.model, pytest.mark.slow]

NUM_TOKENS = 48
TEXT = "one two three four five six seven\n" * 3
"""Something to go on with, of which n-grams make good drafts."""
KILLED_AFTER = {"off": (0, 1, 2, 4, 7, 11, 16, 23, 31, 42), "auto": (0, 1, 2, 3, 4, 6, 8, 10, 12, 14)}
"""Messages with tokens by the way that the cloud is used: one a token where it generates, one a round otherwise."""


MODES = {"off": "cloud_generate", "auto": "cloud_verify"}


@dataclass(frozen=True)
class Answer:
    """What a caller saw of one stream."""

    ids: list[int]
    report: dict[str, Any]


@dataclass
class Edge:
    """The agent, seen through its API."""

    url: str
    prompt: tuple[int, ...]
    ids_by_text: dict[str, int]
    stop_ids: frozenset[int]

    async def ask(
        self, speculation: str, execution: str = "prefer_cloud", on_event: Callable[[], None] = lambda: None
    ) -> str:
        """The stream's text. on_event: called as each event comes."""
        body = {
            "prompt": list(self.prompt),
            "temperature": 0,
            "max_tokens": NUM_TOKENS,
            "min_tokens": NUM_TOKENS,
            "logprobs": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "souschef": {"execution": execution, "speculation": speculation, "max_gamma": 2},
        }
        text = ""
        async with (
            httpx.AsyncClient(timeout=120) as client,
            client.stream("POST", f"{self.url}/v1/completions", json=body) as response,
        ):
            async for piece in response.aiter_text():
                text += piece
                on_event()
        return text

    def read(self, streamed: str) -> Answer:
        """Checked as far as one can without the model: no gap, no repeat, and the origins add up."""
        *frames, done = events(streamed)
        assert done == "[DONE]", streamed
        choices = [choice for frame in frames for choice in frame["choices"]]
        logged = [choice["logprobs"] for choice in choices if choice["logprobs"]]
        spelled = [token for each in logged for token in each["tokens"]]
        text = "".join(choice["text"] for choice in choices)
        report = frames[-1]["souschef"]
        assert "".join(spelled) == text
        offsets = [offset for each in logged for offset in each["text_offset"]]
        assert offsets == list(itertools.accumulate(map(len, spelled), initial=0))[:-1]
        assert frames[-1]["usage"]["completion_tokens"] == len(spelled) == NUM_TOKENS
        assert sum(report["tokens_by_origin"].values()) == NUM_TOKENS
        return Answer([self.ids_by_text[each] for each in spelled], report)

    async def until_the_cloud_answers(self) -> None:
        """The circuit breaker rests, then one probe goes through."""
        body = {"prompt": "a", "max_tokens": 1, "souschef": {"execution": "only_cloud"}}
        async with httpx.AsyncClient(timeout=120) as client, asyncio.timeout(120):
            while True:
                if (await client.post(f"{self.url}/v1/completions", json=body)).status_code == 200:
                    return
                await asyncio.sleep(0.2)

    async def always_verify(self) -> None:
        """However slow the cloud is beside the device here, what may be verified there is."""
        async with httpx.AsyncClient(timeout=120) as client:
            (await client.put(f"{self.url}/v1/policy", json={"min_cloud_speed": 0})).raise_for_status()


@dataclass
class Scene:
    """The three of them, and the model to compare with."""

    cloud: CloudProcess
    gate: TokenGate
    edge: Edge
    model: OnnxModel
    right: set[tuple[int, ...]] = field(default_factory=set)
    """Answers that were checked."""

    async def undisturbed(self, speculation: str) -> Answer:
        return self.edge.read(await self.edge.ask(speculation))

    async def disturbed(
        self, speculation: str, after: int, disturb: Callable[[], None], on_event: Callable[[], None] = lambda: None
    ) -> Answer:
        """An answer during which something happens to the cloud once so many messages have passed."""
        return self.edge.read(await self.interrupted(speculation, "prefer_cloud", after, disturb, on_event))

    async def interrupted(
        self,
        speculation: str,
        execution: str,
        after: int,
        disturb: Callable[[], None],
        on_event: Callable[[], None] = lambda: None,
    ) -> str:
        self.gate.close_after(after)
        asked = asyncio.create_task(self.edge.ask(speculation, execution, on_event))
        reached = asyncio.create_task(self.gate.reached.wait())
        await asyncio.wait({asked, reached}, return_when=asyncio.FIRST_COMPLETED)
        assert reached.done(), f"the answer took fewer than {after} messages: {asked.result()}"
        disturb()
        return await asked

    def kill(self) -> None:
        self.cloud.kill()
        self.gate.cut()
        self.gate.open()

    def restart(self) -> None:
        """Killed and back on the same port before the edge hears of it."""
        self.cloud.kill()
        self.cloud.start()
        self.gate.cut()
        self.gate.open()

    def assert_right(self, answer: Answer) -> None:
        """Each token is the model's own at its place: what was lost or said twice would make the next one wrong."""
        if tuple(answer.ids) not in self.right:
            assert_the_models_own(self.model, self.edge.prompt, answer.ids, never=self.edge.stop_ids)
            self.right.add(tuple(answer.ids))

    async def assert_undisturbed(self, speculation: str) -> None:
        """The cloud is used, and what comes is right."""
        answer = await self.undisturbed(speculation)
        self.assert_right(answer)
        assert {decision["mode"] for decision in answer.report["decisions"]} == {MODES[speculation]}


@asynccontextmanager
async def set_up(directory: Path, log: Path) -> AsyncIterator[Scene]:
    tokenizer = Tokenizer.from_directory(directory)
    ids = range(tokenizer.vocab_size)
    ids_by_text = {tokenizer.token_bytes(token).decode(errors="replace"): token for token in ids}
    with ExitStack() as stack:
        cloud = CloudProcess(log, model=directory)
        gate = TokenGate(cloud.port)
        async with gate.running() as port:
            flags = ["--target", str(directory), "--draft", "none", "--threads", "1", "--port", "0"]
            flags += ["--context-length", "512", "--cloud-url", f"http://127.0.0.1:{port}"]
            url, _ = await asyncio.gather(  # Each takes its time to start.
                asyncio.to_thread(stack.enter_context, serving("edge_agent", ["serve", *flags])),
                asyncio.to_thread(stack.enter_context, cloud),
            )
            model = OnnxModel(directory, context_length=512, num_threads=1)
            edge = Edge(url, tuple(tokenizer.encode(TEXT)), ids_by_text, tokenizer.eos_ids)
            await edge.always_verify()
            await edge.until_the_cloud_answers()
            yield Scene(cloud, gate, edge, model)


@dataclass(frozen=True)
class Stage:
    """The scene, which all tests share, on the loop that it lives on."""

    runner: asyncio.Runner
    scene: Scene

    def run(self, act: Callable[[Scene], Coroutine[Any, Any, None]]) -> None:
        self.runner.run(act(self.scene))


@pytest.fixture(scope="module")
def stage(smollm2_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with asyncio.Runner() as runner:
        opening = set_up(smollm2_directory, tmp_path_factory.mktemp("cloud") / "log")
        scene = runner.run(opening.__aenter__())
        try:
            yield Stage(runner, scene)
        finally:
            runner.run(opening.__aexit__(None, None, None))


both_ways = pytest.mark.parametrize("speculation", list(MODES))


@both_ways
def test_killed_at_ten_places(speculation: str, stage: Stage) -> None:
    """The device goes on where the cloud broke off, and the cloud is used again once it is back."""

    async def act(scene: Scene) -> None:
        await scene.assert_undisturbed(speculation)
        for after in KILLED_AFTER[speculation]:
            answer = await scene.disturbed(speculation, after, scene.kill)
            scene.cloud.start()
            scene.assert_right(answer)
            handoff = answer.report["handoffs"][-1] if after else {"position": 0}
            assert "cloud_unavailable" in {decision["reason"] for decision in answer.report["decisions"]}
            generates = MODES[speculation] == "cloud_generate"
            assert handoff["position"] == after if generates else handoff["position"] >= after
            await scene.edge.until_the_cloud_answers()
        await scene.assert_undisturbed(speculation)

    stage.run(act)


def test_killed_where_the_device_may_not_go_on(stage: Stage) -> None:
    """What was said stays said; then comes an error, and nothing that looks like an end."""

    async def act(scene: Scene) -> None:
        for speculation in MODES:
            for after in (0, 5):
                *chunks, last = events(await scene.interrupted(speculation, "only_cloud", after, scene.kill))
                scene.cloud.start()
                assert last["error"]["code"] == "cloud_unavailable"
                choices = [choice for chunk in chunks for choice in chunk["choices"]]
                assert {choice["finish_reason"] for choice in choices} == {None}
                assert sum(len(choice["logprobs"]["tokens"]) for choice in choices if choice["logprobs"]) >= after
                await scene.edge.until_the_cloud_answers()

    stage.run(act)


@both_ways
def test_restarted_in_the_middle(speculation: str, stage: Stage) -> None:
    """Its sessions are lost with it; the edge opens another, and the cloud goes on with the same answer."""

    async def act(scene: Scene) -> None:
        for after in (1, 5, 11):
            answer = await scene.disturbed(speculation, after, scene.restart)
            scene.assert_right(answer)
            assert {decision["mode"] for decision in answer.report["decisions"]} == {MODES[speculation]}
            assert not answer.report["handoffs"]

    stage.run(act)


@both_ways
def test_frozen_past_the_timeout_and_continued_in_the_middle(speculation: str, stage: Stage) -> None:
    """The device goes on; what the cloud then still says about the answer is heard by nobody."""

    async def act(scene: Scene) -> None:
        is_frozen = False

        def freeze() -> None:
            nonlocal is_frozen
            is_frozen = True
            scene.cloud.signal(signal.SIGSTOP)

        def thaw() -> None:
            nonlocal is_frozen
            if is_frozen:  # The device has gone on.
                is_frozen = False
                scene.cloud.signal(signal.SIGCONT)
                scene.gate.open()

        answer = await scene.disturbed(speculation, 5, freeze, thaw)
        scene.assert_right(answer)
        assert not is_frozen
        assert "cloud_unavailable" in {decision["reason"] for decision in answer.report["decisions"]}
        assert answer.report["handoffs"][0]["position"] >= 5
        await scene.edge.until_the_cloud_answers()
        await scene.assert_undisturbed(speculation)

    stage.run(act)
