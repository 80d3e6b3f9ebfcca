"""One streamed chat request, timed at the socket."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

import httpx


@dataclass(frozen=True)
class Timing:
    """What a client saw. Times in seconds; `decode_s` runs from the first token to the last."""

    text: str
    num_tokens: int
    first_token_s: float
    decode_s: float
    extra: dict[str, Any]

    @property
    def tokens_per_second(self) -> float:
        """Decoding speed, the first token excluded."""
        return (self.num_tokens - 1) / self.decode_s if self.num_tokens > 1 else float("nan")


def chat(url: str, prompt: str, max_tokens: int, *, key: str | None = None, **fields: Any) -> Timing:
    """Stream a greedy answer to one user message. `fields` go into the request's body."""
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **fields,
    }
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    text, extra, num_tokens = "", {}, 0
    started = time.perf_counter()
    first = last = started
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, headers=headers, timeout=600) as response:
        if response.status_code != 200:
            raise RuntimeError(f"{url} answered {response.status_code}: {response.read().decode()[:500]}")
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise RuntimeError(f"{url} failed in mid-answer: {chunk['error']}")
            delta = chunk["choices"][0]["delta"].get("content") if chunk["choices"] else None
            if delta:
                last = time.perf_counter()
                first = last if not text else first
                text += delta
            num_tokens = (chunk.get("usage") or {}).get("completion_tokens", num_tokens)
            extra.update({key: chunk[key] for key in ("souschef", "timings") if key in chunk})
    return Timing(text, num_tokens, first - started, last - first, extra)
