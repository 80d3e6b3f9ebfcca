"""Server-sent events: making frames, and reading them from bytes that come in any pieces."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

MAX_LINE_BYTES = 1 << 20

PING = b": ping\n\n"


class SseOverflowError(ValueError):
    """A line that never ends."""


def frame(content: Mapping[str, Any]) -> bytes:
    """One event. JSON in ASCII: U+2028 and its kin, which some clients take for line ends, never stand in it."""
    text = json.dumps(content, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return f"data: {text}\n\n".encode("ascii")


class SseParser:
    r"""Cuts a stream into the data of its events.

    Lines end with \n, \r or \r\n and nothing else (`str.splitlines` and httpx's `iter_lines` also cut at U+2028, U+0085
    and others, which may stand inside of JSON). Comments and fields other than `data` are skipped.
    """

    def __init__(self) -> None:
        self._line = bytearray()
        self._data: list[bytes] = []
        self._after_cr = False

    def feed(self, chunk: bytes) -> list[str]:
        """The data of each event that the chunk completes.

        Raises:
            SseOverflowError: a line is over 1 MiB.
        """
        events: list[str] = []
        start = 0
        if self._after_cr and chunk[:1] == b"\n":
            start = 1
        if chunk:
            self._after_cr = False
        while start < len(chunk):
            end = _line_end(chunk, start)
            if end < 0:
                self._line += chunk[start:]
                break
            self._line += chunk[start:end]
            self._end_line(events)
            start = end + 1
            if chunk[end] == 0x0D:
                if start == len(chunk):
                    self._after_cr = True
                elif chunk[start] == 0x0A:
                    start += 1
        if len(self._line) > MAX_LINE_BYTES:
            raise SseOverflowError(f"a line of an event stream is over {MAX_LINE_BYTES} bytes")
        return events

    def _end_line(self, events: list[str]) -> None:
        line = bytes(self._line)
        self._line.clear()
        if not line:
            if self._data:
                events.append(b"\n".join(self._data).decode("utf-8", errors="replace"))
                self._data.clear()
            return
        field, _, value = line.partition(b":")
        if field == b"data":
            self._data.append(value.removeprefix(b" "))


def _line_end(chunk: bytes, start: int) -> int:
    """Index of the next \\n or \\r, -1 if there is none."""
    ends = [index for index in (chunk.find(b"\n", start), chunk.find(b"\r", start)) if index >= 0]
    return min(ends, default=-1)
