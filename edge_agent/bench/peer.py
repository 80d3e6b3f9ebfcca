"""Any OpenAI-compatible server beside ours: llama.cpp's, vLLM, another Souschef."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

import httpx

from edge_agent.bench.answer_timing import AnswerTiming
from edge_agent.scenarios import Scenario
from shared.errors import ConfigError
from shared.sse import SseParser

TIMEOUT = httpx.Timeout(600.0, connect=10.0)


@dataclass(frozen=True)
class Stream:
    """What a stream has brought so far. Times in seconds since the request."""

    text: str = ""
    num_chunks: int = 0
    num_tokens: int | None = None
    first_s: float | None = None
    last_s: float = 0.0

    def add(self, chunk: dict[str, Any], at: float) -> Stream:
        """One more chunk."""
        usage = chunk.get("usage") or {}
        choices = chunk.get("choices") or [{}]
        delta = (choices[0].get("delta") or {}).get("content") or ""
        tokens = usage.get("completion_tokens", self.num_tokens)
        if not delta:
            return replace(self, num_tokens=tokens)
        first = at if self.first_s is None else self.first_s
        return Stream(self.text + delta, self.num_chunks + 1, tokens, first, at)


class PeerContender:
    """Asks over HTTP. CPU time and energy are its own business, so they stay unknown."""

    def __init__(self, url: str, *, key: str | None = None, model: str | None = None, name: str = "peer") -> None:
        self.name = name
        self._url = url.rstrip("/").removesuffix("/v1")
        self._model = model
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._client = httpx.AsyncClient(headers=headers, timeout=TIMEOUT)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._client.aclose()

    def takes(self, scenario: Scenario) -> bool:
        """Everything: a prediction is left out, as not every server knows it."""
        return True

    async def answer(self, scenario: Scenario, max_tokens: int) -> AnswerTiming:
        """See `Contender.answer`. The prompt may be cached there unless its beginning changes.

        Raises:
            ConfigError: the address does not answer as an OpenAI server does.
        """
        body = {
            "model": await self._model_name(),
            "messages": [{"role": "user", "content": scenario.text}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        started = time.perf_counter()
        stream = Stream()
        try:
            async for chunk in self._chunks(body):
                stream = stream.add(chunk, time.perf_counter() - started)
        except httpx.HTTPError as error:
            raise ConfigError(f"--peer {self._url} can't be reached: {type(error).__name__}") from error
        # Servers that report no usage send about a token a chunk.
        num_tokens = stream.num_chunks if stream.num_tokens is None else stream.num_tokens
        total_s = stream.last_s or time.perf_counter() - started
        return AnswerTiming(stream.text, num_tokens, total_s, total_s if stream.first_s is None else stream.first_s)

    async def _chunks(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        parser = SseParser()
        async with self._client.stream("POST", f"{self._url}/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                said = (await response.aread()).decode(errors="replace")[:200]
                raise ConfigError(f"--peer {self._url} answered {response.status_code}: {said}")
            async for data in response.aiter_bytes():
                for event in parser.feed(data):
                    if event != "[DONE]":
                        yield self._parsed(event)

    def _parsed(self, event: str) -> dict[str, Any]:
        try:
            chunk = json.loads(event)
        except ValueError as error:
            raise ConfigError(f"--peer {self._url} must answer in JSON") from error
        if not isinstance(chunk, dict) or "error" in chunk:
            raise ConfigError(f"--peer {self._url} failed in mid-answer: {event[:200]}")
        return chunk

    async def _model_name(self) -> str:
        """The name that was given, else the first listed, else one that servers of a single model take."""
        if self._model is None:
            self._model = "default"
            try:
                listed = (await self._client.get(f"{self._url}/v1/models")).json()
                self._model = str(listed["data"][0]["id"])
            except httpx.HTTPError as error:
                raise ConfigError(f"--peer {self._url} can't be reached: {type(error).__name__}") from error
            except (ValueError, KeyError, IndexError, TypeError):
                pass
        return self._model
