"""A chat in the terminal, with a running agent or with models of its own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import httpx
from rich.console import Console

from edge_agent.agent import Agent, open_agent
from edge_agent.completion import Completion
from edge_agent.config import EdgeSettings
from edge_agent.openai_schema import ChatRequest
from edge_agent.serve import engine_loader, fetch_models
from shared.errors import SouschefError
from shared.sse import SseParser

CONNECT_S = 10.0
SILENCE_S = 120.0
"""How long a running agent may send nothing, not even a ping."""

Message = dict[str, str]
HELP = "/reset starts anew, /quit leaves, Ctrl-C stops an answer"


class ChatError(SouschefError):
    """The agent refused, failed, or can't be reached."""


@dataclass(frozen=True)
class ChatOptions:
    """What applies to every answer of a chat."""

    system: str | None = None
    temperature: float = 0.7
    max_tokens: int | None = None

    def body(self, messages: list[Message]) -> dict[str, Any]:
        """The request for the next answer."""
        head = [{"role": "system", "content": self.system}] if self.system else []
        body: dict[str, Any] = {"messages": [*head, *messages], "temperature": self.temperature, "stream": True}
        return body | ({"max_tokens": self.max_tokens} if self.max_tokens else {})


class Partner(Protocol):
    """Who answers: pieces of text, then the report."""

    def answer(self, body: dict[str, Any]) -> AsyncGenerator[str | dict[str, Any], None]:
        """Raises `SouschefError` when there is no answer, or no end of it."""


class RemotePartner:
    """A running agent."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    async def answer(self, body: dict[str, Any]) -> AsyncGenerator[str | dict[str, Any], None]:
        """Raises `ChatError` when the agent refuses, fails or can't be reached."""
        parser = SseParser()
        try:
            async with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != httpx.codes.OK:
                    await response.aread()
                    raise ChatError(_error_message(response))
                async for data in response.aiter_bytes():
                    for event in parser.feed(data):
                        if event != "[DONE]":
                            for part in _parts(json.loads(event)):
                                yield part
        except httpx.HTTPError as error:
            raise ChatError(f"the agent at {self._client.base_url} can't be reached: {error}") from error


class LocalPartner:
    """An agent in this process, without HTTP."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    async def answer(self, body: dict[str, Any]) -> AsyncGenerator[str | dict[str, Any], None]:
        """Raises `RequestError` or `EngineError`."""
        arrived = self._agent.clock()
        generation = self._agent.translator.generation(ChatRequest.model_validate(body), tenant="console")
        completion = Completion(self._agent, generation, arrived=arrived)
        async with completion.open() as pieces:
            async for piece in pieces:
                yield piece.text
        yield dict(completion.tally.report())


def chat_with_agent(url: str, api_key: str | None, options: ChatOptions) -> None:
    """Chat with a running agent until the user leaves."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    @asynccontextmanager
    async def meet() -> AsyncIterator[Partner]:
        timeout = httpx.Timeout(SILENCE_S, connect=CONNECT_S)
        async with httpx.AsyncClient(
            base_url=url.rstrip("/").removesuffix("/v1"), headers=headers, timeout=timeout
        ) as client:
            yield RemotePartner(client)

    _chat(meet(), options)


def chat_with_engine(settings: EdgeSettings, options: ChatOptions) -> None:
    """Chat with models loaded here until the user leaves.

    Raises:
        ModelError: a model can't be had.
    """
    fetch_models(settings)

    @asynccontextmanager
    async def meet() -> AsyncIterator[Partner]:
        async with open_agent(settings, engine_loader(settings)) as agent:
            yield LocalPartner(agent)

    _chat(meet(), options)


def _chat(meeting: AbstractAsyncContextManager[Partner], options: ChatOptions) -> None:
    console = Console(highlight=False)
    messages: list[Message] = []
    with asyncio.Runner() as runner:
        partner = runner.run(meeting.__aenter__())
        try:
            console.print(f"[dim]{HELP}[/dim]")
            while (line := _read_line(console)) is not None:
                if line == "/reset":
                    messages.clear()
                    console.print("[dim]a new conversation[/dim]")
                elif line.startswith("/"):
                    console.print(f"[dim]{HELP}[/dim]")
                elif line:
                    _turn(runner, console, partner, options, messages, line)
        except KeyboardInterrupt:  # Between an answer and the prompt, or before an answer: as at the prompt.
            console.print()
        finally:
            runner.run(meeting.__aexit__(None, None, None))


def _read_line(console: Console) -> str | None:
    """What the user typed; None when they leave."""
    try:
        line = console.input("[bold]you>[/bold] ").strip()
    except (EOFError, KeyboardInterrupt):
        console.print()
        return None
    return None if line in ("/quit", "/exit") else line


def _turn(
    runner: asyncio.Runner, console: Console, partner: Partner, options: ChatOptions, messages: list[Message], line: str
) -> None:
    """One question and its answer. What was answered before a Ctrl-C stays in the conversation."""
    messages.append({"role": "user", "content": line})
    text: list[str] = []
    try:
        report = runner.run(_print_answer(console, partner, options.body(messages), text))
        console.print(f"\n[dim]{summary(report)}[/dim]")
    except KeyboardInterrupt:
        console.print("\n[dim]stopped[/dim]")
    except SouschefError as error:
        console.print(f"\n[red]{error}[/red]")
    if text:
        messages.append({"role": "assistant", "content": "".join(text)})
    else:
        messages.pop()


async def _print_answer(console: Console, partner: Partner, body: dict[str, Any], text: list[str]) -> dict[str, Any]:
    report: dict[str, Any] = {}
    async with aclosing(partner.answer(body)) as parts:
        async for part in parts:
            if isinstance(part, str):
                text.append(part)
                console.out(printable(part), end="")
            else:
                report = part
    return report


def printable(text: str) -> str:
    """The text without control characters: an answer must not drive the terminal."""
    return "".join(c for c in text if c in "\n\t" or not (ord(c) < 0x20 or 0x7F <= ord(c) < 0xA0))


def summary(report: dict[str, Any]) -> str:
    """An answer's figures in one line."""
    figures = [f"{sum(report.get('tokens_by_origin', {}).values())} tokens"]
    if "tokens_per_second" in report:
        figures.append(f"{report['tokens_per_second']:.1f} tokens/s")
    if "ttft_ms" in report:
        figures.append(f"first after {report['ttft_ms'] / 1000:.2f} s")
    if "acceptance_rate" in report:
        figures.append(f"{report['acceptance_rate']:.0%} of {report['draft_tokens']} drafts accepted")
    return " · ".join(figures)


def _parts(event: dict[str, Any]) -> list[str | dict[str, Any]]:
    """The text and the report of one event."""
    if "error" in event:
        raise ChatError(event["error"]["message"])
    parts: list[str | dict[str, Any]] = [choice["delta"].get("content", "") for choice in event["choices"]]
    return [*parts, event["souschef"]] if "souschef" in event else parts


def _error_message(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the address answers with status {response.status_code}, not as an agent does"
